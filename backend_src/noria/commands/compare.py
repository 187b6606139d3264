"""`noria compare`: the batching modes under one workload, each on a server of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from noria.commands.common import (
    add_engine_arguments,
    engine_config,
    prepare_model,
    say,
    server_options,
    server_starter,
)
from noria.serving.server import ServerOptions
from noria_bench.compare_command import add_compare_arguments, run_compare
from noria_bench.report import ModeResult
from noria_bench.workload import Workload


def add_compare(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "compare",
        help="measure the batching modes under one workload",
        description="Starts one server per mode, sends each the same workload and prints what each costs.",
    )
    add_compare_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--engine-alone",
        action="store_true",
        help="measure the in-flight engine without a server too, as a last column",
    )
    parser.set_defaults(run=_run_compare)


def _run_compare(args: argparse.Namespace) -> int:
    options = server_options(args)
    prepare_model(options)
    with server_starter(options) as start_server:
        return run_compare(args, start_server, measure_engine=_engine_measurer(options) if args.engine_alone else None)


def _engine_measurer(options: ServerOptions) -> Callable[[Workload], ModeResult]:
    def measure(workload: Workload) -> ModeResult:
        # as in the stub, and before torch is loaded; see serving.server.server_environment
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from noria.offline import run_offline

        return run_offline(engine_config(options), workload, say)

    return measure
