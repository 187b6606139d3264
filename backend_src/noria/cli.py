"""The `noria` command. serve, compare and demo start servers; generate and chat are the client's own.

Knows what the user typed; how a server runs is `serving.server`'s business, what a client does is `noria_client`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from noria.config import EMBEDDED_MODEL, EngineConfig
from noria.config_sources import load_engine_config
from noria.errors import ConfigError, NoriaError
from noria.serving.machine import free_ports
from noria.serving.server import (
    RunningServer,
    ServerOptions,
    check_mode,
    config_parameters,
    default_repository,
    engine_environment,
)
from noria_client.cli import add_chat, add_compare_arguments, add_generate, run_compare
from noria_client.client import Client
from noria_client.compare import ServerUrls
from noria_client.errors import ServerError
from noria_client.report import ModeResult
from noria_client.workload import Workload

DEMO_QUESTION = "In three sentences: why does a water wheel turn?"
DEMO_SCALE = 0.15


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a stated error, 2 wrong usage, 130 interrupted."""
    own, extra = _split(sys.argv[1:] if arguments is None else list(arguments))
    parser = _parser()
    args = parser.parse_args(own)
    if extra and args.command != "serve":
        parser.error("only serve takes arguments after --")
    args.extra_arguments = extra
    # a plain kill or a closed terminal stops our servers in order, as Ctrl-C does
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return int(args.run(args))
    except (NoriaError, ServerError) as error:
        print(f"noria: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands after the first -- is for tritonserver."""
    if "--" not in arguments:
        return arguments, []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noria", description="Text generation inside Triton Inference Server.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = subparsers.add_parser(
        "serve",
        help="run a server until Ctrl-C",
        description="Serves the model repository with tritonserver. Arguments after -- are passed on to tritonserver.",
    )
    serve.add_argument(
        "--mode",
        default="inflight",
        metavar="NAME",
        help="a config of the repository: inflight (default), static, ...",
    )
    _add_engine_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="default: 8000")
    serve.add_argument("--grpc-port", type=int, default=8001, metavar="PORT", help="default: 8001")
    serve.add_argument("--metrics-port", type=int, default=8002, metavar="PORT", help="default: 8002")
    serve.set_defaults(run=_run_serve)
    add_generate(subparsers)
    add_chat(subparsers)
    compare = subparsers.add_parser(
        "compare",
        help="measure the batching modes under one workload",
        description="Starts one server per mode, sends each the same workload and prints what each costs.",
    )
    add_compare_arguments(compare)
    _add_engine_arguments(compare)
    compare.add_argument(
        "--engine-alone",
        action="store_true",
        help="measure the in-flight engine without a server too, as a last column",
    )
    compare.set_defaults(run=_run_compare)
    demo = subparsers.add_parser(
        "demo",
        help="one streamed answer, then a small comparison of the modes",
        description="Streams an answer of the model, then compares the three batching modes on a scaled-down workload.",
    )
    demo.set_defaults(run=_run_demo)
    return parser


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face directory or a .gguf file (default: the embedded)"
    )
    parser.add_argument("--repository", type=Path, metavar="DIR", help="model repository (default: the project's)")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="KEY=VALUE", help="overrides engine.json; may be repeated"
    )


def _run_serve(args: argparse.Namespace) -> int:
    options = replace(
        _options(args),
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        extra_arguments=args.extra_arguments,
    )
    _prepare_model(options)
    with RunningServer(options) as server:
        urls = f"grpc {server.grpc_url}, http {server.http_url}, metrics {server.metrics_address}"
        _say(f"ready, mode {options.mode}: {urls}; Ctrl-C or SIGTERM stops it")
        return server.wait()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run_compare(args: argparse.Namespace) -> int:
    options = _options(args)
    _prepare_model(options)
    with _server_starter(options) as start_server:
        return run_compare(args, start_server, measure_engine=_engine_measurer(options) if args.engine_alone else None)


def _engine_measurer(options: ServerOptions) -> Callable[[Workload], ModeResult]:
    def measure(workload: Workload) -> ModeResult:
        # as in the stub, and before torch is loaded; see serving.server.server_environment
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from noria.offline import run_offline

        return run_offline(_engine_config(options), workload, _say)

    return measure


def _run_demo(_: argparse.Namespace) -> int:
    options = ServerOptions(default_repository())
    _prepare_model(options)
    with _server_starter(options) as start_server:
        _say("starting tritonserver in in-flight mode")
        with start_server("inflight") as urls:
            _say(f"asking: {DEMO_QUESTION}")
            _stream_answer(urls)
        _say(f"comparing the modes on the seed workload at {DEMO_SCALE} of its lengths")
        args = argparse.ArgumentParser()
        add_compare_arguments(args)
        return run_compare(args.parse_args(["--scale", str(DEMO_SCALE)]), start_server)


def _stream_answer(urls: ServerUrls) -> None:
    with Client(urls.grpc) as client:
        messages = [{"role": "user", "content": DEMO_QUESTION}]
        for delta in client.stream(messages, max_tokens=120, temperature=0):
            print(delta.text, end="", flush=True)
    print()


def _say(text: str) -> None:
    print(f"noria: {text}", file=sys.stderr, flush=True)


def _options(args: argparse.Namespace) -> ServerOptions:
    """What serve and compare have in common. Raises ConfigError for what would fail in the server's log otherwise."""
    engine: dict[str, Any] = dict(_key_value(text) for text in args.engine)
    if args.model is not None:
        engine["model"] = args.model
    # tritonserver runs in another directory
    if isinstance(engine.get("model"), str) and engine["model"] not in ("", EMBEDDED_MODEL):
        engine["model"] = str(Path(engine["model"]).resolve())
    if isinstance(engine.get("cache_dir"), str):
        engine["cache_dir"] = str(Path(engine["cache_dir"]).resolve())
    mode = getattr(args, "mode", "inflight")
    options = ServerOptions(args.repository or default_repository(), mode, engine=engine)
    check_mode(options.repository, mode)
    _engine_config(options)
    return options


def _key_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--engine takes KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _engine_config(options: ServerOptions) -> EngineConfig:
    path = options.repository / "llm" / "1" / "engine.json"
    parameters = config_parameters(options.repository, options.mode)
    return load_engine_config(path, parameters, engine_environment(options.engine, os.environ))


def _prepare_model(options: ServerOptions) -> None:
    """Convert the model, where it needs that, before a server starts: in front of the user, and once."""
    # imports torch when there is something to convert
    from noria.models.model_store import resolve_model

    config = _engine_config(options)
    resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, _say)


@contextmanager
def _server_starter(options: ServerOptions) -> Iterator[Any]:
    """A function from a mode to a running server on free ports. Its logs go when no longer needed."""
    with tempfile.TemporaryDirectory(prefix="noria-") as folder:

        @contextmanager
        def start(mode: str) -> Iterator[ServerUrls]:
            http_port, grpc_port, metrics_port = free_ports(options.host)
            own = replace(options, mode=mode, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
            with RunningServer(own, Path(folder) / f"{mode}.log") as server:
                yield ServerUrls(server.grpc_url, server.http_url, server.metrics_address)

        yield start


if __name__ == "__main__":
    sys.exit(main())
