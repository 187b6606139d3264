"""`noria compare`, but for how servers are started: its flags, what it prints, its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from noria_bench.compare import ServerUrls, compare
from noria_bench.report import ModeResult, comparison_table
from noria_bench.workload import Workload, seed_workload
from noria_client.chat import error_line
from noria_client.cli import INTERRUPTED, positive
from noria_client.client import DEFAULT_MODEL
from noria_client.errors import ServerError

MODES = ("static", "dynamic", "inflight")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `run_compare` reads."""
    parser.add_argument(
        "--modes", type=_modes, default=list(MODES), metavar="M,M", help=f"in order (default: {','.join(MODES)})"
    )
    parser.add_argument("--num-requests", type=positive(int), default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--scale",
        type=positive(float),
        default=1.0,
        help="multiplies prompt and output lengths; 0.2 is a quick look (default: 1)",
    )
    parser.add_argument("--workload-seed", type=int, default=0, metavar="N", help="of lengths and prompts (default: 0)")
    parser.add_argument(
        "--concurrency", type=positive(int), metavar="N", help="requests under way at a time (default: all at once)"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the results as JSON, too, to FILE; without FILE to standard output instead of the table",
    )


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"modes are {', '.join(MODES)}, separated by commas, not {unknown[0]!r}")
    return modes


def run_compare(
    args: argparse.Namespace,
    start_server: Callable[[str], AbstractContextManager[ServerUrls]],
    model: str = DEFAULT_MODEL,
    measure_engine: Callable[[Workload], ModeResult] | None = None,
) -> int:
    """Measures, prints the table and writes the JSON. Returns 1 if requests failed, 130 after Ctrl-C, otherwise 0.

    measure_engine: measures what can be had without a server, as a last column.
    """
    workload = seed_workload(args.num_requests, args.scale, args.workload_seed)
    if args.json not in (None, "-"):
        # before minutes of measurement, not after
        try:
            Path(args.json).touch()
        except OSError as error:
            print(f"noria: --json {args.json} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    try:
        results = compare(args.modes, start_server, workload, model=model, concurrency=args.concurrency)
    except ServerError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    is_complete = len(results) == len(args.modes) and not any(result.is_interrupted for result in results)
    if measure_engine is not None and is_complete:
        results.append(measure_engine(workload))
    if args.json == "-":
        print(results_json(results))
    elif results:
        Console().print(comparison_table(results))
    if args.json not in (None, "-"):
        Path(args.json).write_text(results_json(results) + "\n")
    if not is_complete:
        return INTERRUPTED
    return 1 if any(result.num_errors for result in results) else 0


def results_json(results: Sequence[ModeResult]) -> str:
    """A JSON list with one object per mode; its keys are ModeResult's fields."""
    return json.dumps([result.to_json() for result in results], indent=2)
