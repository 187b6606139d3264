"""`noria calibrate`: how long steps take on this machine, measured and written down for the simulator."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from noria.commands.common import add_engine_arguments, check_can_write, engine_config, say, server_options
from noria.commands.sim_options import default_costs_path
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.step_shape import StepSample
from noria.timeline.recorded_trace import read_trace

MAX_TABLE_ROWS = 24


def add_calibrate(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure how long steps take here, for the simulator",
        description="Loads the model, runs steps of all the shapes that the scheduler makes, fits a formula to their "
        "times and writes it where `noria simulate` finds it. Nothing else should run on the machine meanwhile.",
    )
    add_engine_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measurement (default: 60)")
    parser.add_argument(
        "--from-trace",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: fit to steps that a serving engine recorded (the MODE.jsonl of `noria trace`)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: this model's file in the cache directory")
    parser.set_defaults(run=_run_calibrate)


def _run_calibrate(args: argparse.Namespace) -> int:
    config = engine_config(server_options(args))
    path = args.output or default_costs_path(config)
    if not args.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, not {args.seconds}")
    # before a minute of measurement, not after
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
    check_can_write("--output", path)
    # as in the stub, and before torch is loaded; see serving.server.server_environment
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    cost_model, samples = _from_traces(args.from_trace, config) if args.from_trace else _measure(config, args.seconds)
    cost_model.save(path)
    Console().print(calibration_table(cost_model, samples))
    print(path)
    return 0


def _measure(config: EngineConfig, seconds: float) -> tuple[MeasuredCostModel, Sequence[StepSample]]:
    from noria.calibration import calibrate

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("running steps", total=1.0)
        result = calibrate(config, say, seconds, lambda share: progress.update(task, completed=share))
    return result.cost_model, result.samples


def _from_traces(paths: Sequence[Path], config: EngineConfig) -> tuple[MeasuredCostModel, Sequence[StepSample]]:
    from noria.calibration import describe_origin
    from noria.recorded_costs import costs_of_samples, step_samples

    traces = [read_trace(path) for path in paths]
    # the time between the last step of one and the first of another is none of an engine's
    samples = [sample for trace in traces for sample in step_samples(trace.steps)]
    origin = describe_origin(config, say) | {"method": f"steps of {', '.join(map(str, paths))}"}
    return replace(costs_of_samples(samples), origin=origin), samples


def calibration_table(cost_model: MeasuredCostModel, samples: Sequence[StepSample]) -> Table:
    """Measured against fitted times of some of the samples, at even distances by time."""
    error = cost_model.median_relative_error
    caption = f"{len(samples)} steps" + ("" if error is None else f", median error {error:.1%}")
    table = Table(title="What steps cost", caption=caption)
    for heading in (
        "decode rows",
        "their context",
        "prefill tokens",
        "drawn",
        "copies",
        "measured ms",
        "fitted ms",
        "/",
    ):
        table.add_column(heading, justify="right")
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    num_shown = min(MAX_TABLE_ROWS, len(ordered))
    for place in range(num_shown):
        sample = ordered[place * (len(ordered) - 1) // max(1, num_shown - 1)]
        shape, fitted_s = sample.shape, cost_model.seconds_of(sample.shape)
        counts = (
            shape.num_decode_rows,
            shape.num_decode_context,
            shape.num_prefill_tokens,
            shape.num_sampled_rows,
            shape.num_block_copies,
        )
        times = (f"{sample.seconds * 1e3:.2f}", f"{fitted_s * 1e3:.2f}", f"{fitted_s / sample.seconds:.2f}")
        table.add_row(*(str(count) if count else "" for count in counts), *times)
    return table
