"""`noria simulate --validate`: what the simulator predicts against what a served run measures, side by side.

For each mode one server runs three workloads of the same kind, one after the other: half a workload, the workload that
is to be predicted, and another half. The step costs are fitted to the two halves, whose requests are others (of another
seed) than those predicted: nothing of the predicted run is known to the simulation but its requests, the times at which
they were sent, and the number of tokens in their prompts. Before and after, since the pace of a shared machine drifts.

Still it may drift in between. So the table also says how much longer the predicted run's own steps took, all together,
than the costs say (its pace), and what the simulation gives at that pace: the difference is the machine's, not the
model's. Only the first of the two is a prediction.

Requests are sent SPACING_S apart, in the measurement and in the simulation: sent at once they would reach Triton in an
order that nobody knows, and the order decides which lengths are batched together.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noria.commands.common import engine_config, prepare_model, say, server_starter
from noria.commands.sim_options import DEFAULT_NUM_REQUESTS, simulated_options
from noria.commands.sim_report import simulated_run, write_json
from noria.errors import ConfigError, EngineFailure
from noria.recorded_costs import costs_of_samples, pace, step_samples
from noria.serving.server import ServerOptions, check_mode
from noria.simulation.requests import SimRequest
from noria.simulation.simulator import Simulator
from noria.timeline.recorded_trace import RecordedStep, RecordedTrace, read_trace
from noria_bench.distribution import Distribution
from noria_bench.load import LoadRun, run_load
from noria_bench.plain_run import plain_run
from noria_bench.records import RequestRecord
from noria_bench.results import Run
from noria_bench.workload import Workload, seed_workload
from noria_client.client import AsyncClient

SPACING_S = 0.02
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Part:
    """One of the three workloads that a server ran. records: by place in the workload."""

    workload: Workload
    records: tuple[RequestRecord, ...]

    def steps_of(self, trace: RecordedTrace) -> tuple[RecordedStep, ...]:
        """Those that the engine began while this part ran: it and the client read the same clock of the machine."""
        begin_s = min(record.sent_s for record in self.records)
        end_s = max(record.ended_s for record in self.records)
        return tuple(step for step in trace.steps if begin_s <= step.started_s <= end_s)


@dataclass(frozen=True, slots=True)
class ValidatedMode:
    """fit_error: of the step costs on the steps that they were fitted to, median. num_steps: of those.

    pace: of the predicted run's own steps, as a multiple of the costs. repaced: the simulation at that pace.
    """

    predicted: Run
    repaced: Run
    pace: float
    measured: Run
    fit_error: float
    num_steps: int

    @property
    def figures(self) -> list[tuple[str, float, float, float]]:
        """Name, predicted, simulated at the run's own pace, and measured, of what must agree."""
        return [(name, read(self.predicted), read(self.repaced), read(self.measured)) for name, read in _FIGURES]

    @property
    def is_within_tolerance(self) -> bool:
        return all(abs(predicted / measured - 1) <= TOLERANCE for _, predicted, _, measured in self.figures)

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.measured.label,
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json(),
            "fit_error": self.fit_error,
            "num_steps": self.num_steps,
            "ratios": {name: predicted / measured for name, predicted, _, measured in self.figures},
            "pace": self.pace,
            "ratios_at_its_own_pace": {name: repaced / measured for name, _, repaced, measured in self.figures},
        }


def _median(distribution: Distribution | None) -> float:
    return math.nan if distribution is None else distribution.median


_FIGURES: tuple[tuple[str, Callable[[Run], float]], ...] = (
    ("useful output tokens/s", lambda run: run.summary.all.output_tokens_per_s or math.nan),
    ("TTFT s, median", lambda run: _median(run.summary.all.ttft_s)),
    ("TPOT ms, median", lambda run: 1e3 * _median(run.summary.all.tpot_s)),
)


def check_can_validate(args: argparse.Namespace) -> None:
    """Raises ConfigError for what `run_validation` would not do as it was asked."""
    for name, plain in (("workload", "seed"), ("trace", None), ("rate", None), ("concurrency", None), ("replicas", 1)):
        if getattr(args, name) != plain:
            raise ConfigError(f"--validate runs the seed workload on one server: leave out --{name}")
    for name in ("costs", "autoscale", "slo", "shared_prefix"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--validate measures for itself: leave out --{name.replace('_', '-')}")
    for key in ("max_num_seqs", "preemption", "trace_path"):
        if any(text.partition("=")[0] == key for text in args.engine):
            raise ConfigError(f"--validate does not go with --engine {key}")


def run_validation(args: argparse.Namespace, modes: Sequence[str]) -> int:
    """0, whatever the ratios are. Raises ConfigError, and EngineFailure where a request fails."""
    options = simulated_options(args)
    for mode in modes:
        check_mode(options.repository, mode)
    num_requests = args.num_requests or DEFAULT_NUM_REQUESTS
    halves = max(1, num_requests // 2)
    try:
        workloads = [
            seed_workload(num, args.scale, args.seed + offset)
            for num, offset in ((halves, 1), (num_requests, 0), (halves, 2))
        ]
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None
    prepare_model(options)
    validated = [_validate(options, mode, workloads) for mode in modes]
    Console().print(validation_table(validated))
    if args.json is not None:
        write_json(args.json, [mode.to_json() for mode in validated])
    return 0


def _validate(options: ServerOptions, mode: str, workloads: Sequence[Workload]) -> ValidatedMode:
    parts, trace = _serve(options, mode, workloads)
    before, middle, after = parts
    samples = [sample for part in (before, after) for sample in step_samples(part.steps_of(trace))]
    costs = costs_of_samples(samples)
    config = engine_config(replace(options, mode=mode))
    start_s = min(record.sent_s for record in middle.records)
    requests = [
        SimRequest(record.sent_s - start_s, record.num_input_tokens, item.max_tokens)
        for item, record in zip(middle.workload.items, middle.records, strict=True)
    ]
    own_pace = pace(costs, step_samples(middle.steps_of(trace)))
    predicted, repaced = (
        simulated_run(mode, Simulator(config, trace.num_blocks, model).run(requests))
        for model in (costs, costs.scaled(own_pace))
    )
    measured = plain_run(mode, middle.records)
    return ValidatedMode(predicted, repaced, own_pace, measured, costs.median_relative_error or 0.0, len(samples))


def _serve(options: ServerOptions, mode: str, workloads: Sequence[Workload]) -> tuple[list[Part], RecordedTrace]:
    with tempfile.TemporaryDirectory(prefix="noria-") as folder:
        recording = Path(folder) / f"{mode}.jsonl"
        traced = replace(options, engine={**options.engine, "trace_path": str(recording)})
        parts = []
        with server_starter(traced) as start_server, start_server(mode) as urls:
            # what is mapped or cached on first use is so afterwards
            asyncio.run(_send(urls.grpc, Workload(workloads[0].items[:1], workloads[0].sampling)))
            for name, workload in zip(("costs", "to be predicted", "costs"), workloads, strict=True):
                say(f"{mode}: {len(workload.items)} requests, {name}")
                parts.append(Part(workload, asyncio.run(_send(urls.grpc, workload))))
        # the engine writes the last steps when it is closed
        return parts, read_trace(recording)


async def _send(url: str, workload: Workload) -> tuple[RequestRecord, ...]:
    """Each item SPACING_S after the one before. Raises EngineFailure if one fails."""
    spaced = [replace(item, due_s=index * SPACING_S) for index, item in enumerate(workload.items)]
    run = LoadRun(len(spaced))
    async with AsyncClient(url) as client:
        await run_load(client, replace(workload, items=tuple(spaced)), run)
    for record in run.records:
        if record.error is not None:
            raise EngineFailure(f"request {record.index} failed: {record.error}")
    return tuple(sorted(run.records, key=lambda record: record.index))


def validation_table(validated: Sequence[ValidatedMode]) -> Table:
    """A row for each figure of each mode."""
    verdict = "all" if all(mode.is_within_tolerance for mode in validated) else "not all"
    errors = ", ".join(f"{mode.measured.label} {mode.fit_error:.1%} of {mode.num_steps}" for mode in validated)
    table = Table(
        title="Predicted against measured",
        caption=f"{verdict} within {TOLERANCE:.0%}; median errors of the fitted step costs, and steps: {errors}",
    )
    for heading in ("mode", "figure", "predicted", "measured", "ratio", "pace", "ratio at it"):
        table.add_column(heading, justify="left" if heading in ("mode", "figure") else "right")
    for mode in validated:
        for name, predicted, repaced, measured in mode.figures:
            numbers = (predicted, measured, predicted / measured, mode.pace, repaced / measured)
            table.add_row(mode.measured.label, name, *(f"{number:.2f}" for number in numbers))
    return table
