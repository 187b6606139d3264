"""`noria trace`: who was computed when. Records the batching modes at work, or takes recorded files, and draws them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from noria.commands.common import MODES, add_engine_arguments, prepare_model, say, server_options, server_starter
from noria.errors import ConfigError
from noria.serving.server import ServerOptions, check_mode
from noria.timeline.chrome_trace import write_chrome_trace
from noria.timeline.picture import check_can_draw, draw_slots
from noria.timeline.recorded_trace import read_trace
from noria_bench.load import LoadRun, run_load
from noria_bench.workload import Workload, seed_workload
from noria_client.client import AsyncClient


def add_trace(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "trace",
        help="draw which request was in which slot when",
        description="Runs a workload on one server per mode with the engine's steps recorded, and writes for each mode "
        "DIR/MODE.jsonl (the recording) and DIR/MODE.trace.json (for ui.perfetto.dev), and for all of them the picture "
        "DIR/slots.svg and DIR/slots.png.",
    )
    parser.add_argument("--modes", default=",".join(MODES), metavar="M,M", help=f"default: {','.join(MODES)}")
    parser.add_argument("--num-requests", type=int, default=12, metavar="N", help="default: 12")
    parser.add_argument(
        "--scale", type=float, default=0.15, help="multiplies prompt and output lengths of the workload (default: 0.15)"
    )
    parser.add_argument("--workload-seed", type=int, default=0, metavar="N", help="default: 0")
    add_engine_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("trace"), metavar="DIR", help="default: ./trace")
    parser.add_argument(
        "--from",
        dest="recordings",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: convert and draw these, as the engine wrote them to its trace_path",
    )
    parser.set_defaults(run=_run_trace)


def _run_trace(args: argparse.Namespace) -> int:
    # before minutes of measurement, not after
    check_can_draw()
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be made: {error.strerror}") from None
    recordings, num_errors = (args.recordings, 0) if args.recordings else _record(args)
    for path in _convert(recordings, args.output):
        print(path)
    return 1 if num_errors else 0


def _convert(recordings: Sequence[Path], folder: Path) -> list[Path]:
    """The files made from the recordings."""
    traces = {path.stem: read_trace(path) for path in recordings}
    if len(traces) < len(recordings):
        raise ConfigError("--from takes files with different names: the names of what is written are made of theirs")
    events = []
    for name, trace in traces.items():
        events.append(folder / f"{name}.trace.json")
        write_chrome_trace(trace, events[-1])
    pictures = [folder / "slots.svg", folder / "slots.png"]
    draw_slots(traces, pictures)
    return [*events, *pictures]


def _record(args: argparse.Namespace) -> tuple[list[Path], int]:
    """Run the workload in each mode; the recordings, and how many requests failed."""
    options = server_options(args)
    modes = args.modes.split(",")
    for mode in modes:
        check_mode(options.repository, mode)
    try:
        workload = seed_workload(args.num_requests, args.scale, args.workload_seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    prepare_model(options)
    recordings = [(args.output / f"{mode}.jsonl").resolve() for mode in modes]
    num_errors = 0
    for mode, recording in zip(modes, recordings, strict=True):
        say(f"{mode}: {len(workload.items)} requests")
        num_errors += _record_mode(options, mode, workload, recording)
    return recordings, num_errors


def _record_mode(options: ServerOptions, mode: str, workload: Workload, recording: Path) -> int:
    traced = replace(options, engine={**options.engine, "trace_path": str(recording)})
    run = LoadRun(len(workload.items))
    with server_starter(traced) as start_server, start_server(mode) as urls:
        asyncio.run(_send(urls.grpc, workload, run))
    for record in run.records:
        if record.error is not None:
            say(f"{mode}: request {record.index} failed: {record.error}")
    return run.num_errors


async def _send(url: str, workload: Workload, run: LoadRun) -> None:
    async with AsyncClient(url) as client:
        await run_load(client, workload, run)
