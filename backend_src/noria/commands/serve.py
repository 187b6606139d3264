"""`noria serve`: a server until it is told to stop."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import Any

from noria.commands.common import add_engine_arguments, prepare_model, say, server_options
from noria.serving.server import RunningServer


def add_serve(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "serve",
        help="run a server until Ctrl-C",
        description="Serves the model repository with tritonserver. Arguments after -- are passed on to tritonserver.",
    )
    parser.add_argument(
        "--mode",
        default="inflight",
        metavar="NAME",
        help="a config of the repository: inflight (default), static, ...",
    )
    add_engine_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="default: 8000")
    parser.add_argument("--grpc-port", type=int, default=8001, metavar="PORT", help="default: 8001")
    parser.add_argument("--metrics-port", type=int, default=8002, metavar="PORT", help="default: 8002")
    parser.set_defaults(run=_run_serve)


def _run_serve(args: argparse.Namespace) -> int:
    """The server's exit code, 0 where it was ready and has stopped in order. Raises ConfigError."""
    options = replace(
        server_options(args),
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        extra_arguments=args.extra_arguments,
    )
    prepare_model(options)
    with RunningServer(options) as server, suppress(KeyboardInterrupt):
        urls = f"grpc {server.grpc_url}, http {server.http_url}, metrics {server.metrics_address}"
        say(f"ready, mode {options.mode}: {urls}; Ctrl-C or SIGTERM stops it")
        server.wait()
    code = server.exit_code
    assert code is not None
    if code != 0:
        say(f"tritonserver ended with {f'code {code}' if code > 0 else f'signal {-code}'}")
    return code if code >= 0 else 128 - code
