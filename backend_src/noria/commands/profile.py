"""`noria profile`: where the time of a step goes on this machine, beside the least that it could take."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from noria.commands.common import add_engine_arguments, check_can_write, engine_config, say, server_options
from noria.commands.profile_report import floor_table, head_lines, profile_json, time_table
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria_bench.environment import busy_cores, machine

if TYPE_CHECKING:
    from noria.profiling.profiler import Profile

# what the tables take where nobody looks at them through a terminal
FILE_WIDTH = 140


def add_profile(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "profile",
        help="where the time of a step goes here, beside the least that it could take",
        description="Loads the model, runs decode steps and a prompt, and prints what their parts take beside their "
        "floors: bytes over the bandwidth and multiply-adds over the peak, which are measured in between. Nothing else "
        "should run on the machine meanwhile.",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--batch", default="1,4,8,16,32", metavar="N,...", help="sequences in a decode step (default: 1,4,8,16,32)"
    )
    parser.add_argument("--context", type=int, default=300, help="cached tokens of each (default: 300)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prompt; 0 for none (default: 512)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="that tokens are drawn with (default: 0, the likeliest)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of measurement (default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there as well")
    parser.set_defaults(run=_run_profile)


def _run_profile(args: argparse.Namespace) -> int:
    config = engine_config(server_options(args))
    batches = _batches(args.batch)
    for name, is_valid, valid in (
        ("context", args.context >= 0, "at least 0"),
        ("prefill", args.prefill >= 0, "at least 0"),
        ("temperature", args.temperature >= 0, "at least 0"),
        ("seconds", args.seconds > 0, "above 0"),
    ):
        if not is_valid:
            raise ConfigError(f"--{name} must be {valid}, not {getattr(args, name)}")
    # as in the stub, and before torch is loaded; see serving.server.server_environment
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if args.json is not None:
        # not after half a minute of measurement
        check_can_write("--json", args.json)
    environment = {"machine": machine(), "busy_cores_before": busy_cores()}
    profile = _measure(config, batches, args)
    environment["busy_cores_after"] = busy_cores()
    if args.json is not None:
        content = {"command": args.command_line, **environment, **profile_json(profile)}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    for line in head_lines(profile, config, environment):
        console.print(line, highlight=False, markup=False)
    console.print(time_table(profile), floor_table(profile), highlight=False)
    return 0


def _batches(text: str) -> list[int]:
    """Raises ConfigError unless text is numbers of 1 or more with commas between."""
    try:
        batches = [int(word) for word in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ConfigError(f"--batch must be numbers of sequences as in 1,4,8, not {text!r}")
    # the same twice would be measured twice
    return list(dict.fromkeys(batches))


def _measure(config: EngineConfig, batches: list[int], args: argparse.Namespace) -> Profile:
    # imports torch
    from noria.profiling.cases import decode_case, prefill_case
    from noria.profiling.profiler import profile

    cases = [decode_case(num_rows, args.context) for num_rows in batches]
    if args.prefill:
        cases.append(prefill_case(args.prefill))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("running steps", total=1.0)
        return profile(
            config, cases, args.temperature, args.seconds, say, lambda share: progress.update(task, completed=share)
        )
