"""`noria demo`: one streamed answer, then a small comparison of the modes."""

from __future__ import annotations

import argparse
from typing import Any

from noria.commands.bench import run_bench
from noria.commands.bench_options import add_bench_arguments, bench_options
from noria.commands.common import MODES, prepare_model, say, server_starter
from noria.serving.server import ServerOptions, default_repository
from noria_bench.measurement import ServerUrls
from noria_client.client import Client

DEMO_QUESTION = "In three sentences: why does a water wheel turn?"
DEMO_SCALE = 0.15


def add_demo(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "demo",
        help="one streamed answer, then a small comparison of the modes",
        description="Streams an answer of the model, then compares the three batching modes on a scaled-down workload.",
    )
    parser.set_defaults(run=_run_demo)


def _run_demo(_: argparse.Namespace) -> int:
    options = ServerOptions(default_repository())
    prepare_model(options)
    with server_starter(options) as start_server:
        say("starting tritonserver in in-flight mode")
        with start_server("inflight") as urls:
            say(f"asking: {DEMO_QUESTION}")
            _stream_answer(urls)
    say(f"comparing the modes on the seed workload at {DEMO_SCALE} of its lengths")
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    args = parser.parse_args(["seed", "--scale", str(DEMO_SCALE), "--modes", ",".join(MODES)])
    return run_bench(bench_options(args), options, ["noria", "demo"])


def _stream_answer(urls: ServerUrls) -> None:
    with Client(urls.grpc) as client:
        messages = [{"role": "user", "content": DEMO_QUESTION}]
        for delta in client.stream(messages, max_tokens=120, temperature=0):
            print(delta.text, end="", flush=True)
    print()
