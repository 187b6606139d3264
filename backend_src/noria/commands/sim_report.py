"""A simulation in the words of the client's report on a measurement, and a table of what only a simulation sees."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from noria.errors import ConfigError
from noria.simulation.records import RequestRecord as SimulatedRecord
from noria.simulation.summary import SimulationResult, Summary
from noria_bench.distribution import Distribution
from noria_bench.records import Chunk, RequestRecord
from noria_bench.report import ModeResult, summarise


@dataclass(frozen=True, slots=True)
class SimulatedMode:
    """result: as of a measurement. wall_s: of real time that the simulation took."""

    result: ModeResult
    summary: Summary
    wall_s: float
    replica_seconds: float

    def to_json(self) -> dict[str, Any]:
        own = {"speed": self.summary.wall_s / self.wall_s, "replica_seconds": self.replica_seconds}
        return self.result.to_json() | {"simulation": self.summary.to_json() | own}


def mode_result(mode: str, result: SimulationResult) -> ModeResult:
    """What a client's report would say of it."""
    return summarise(
        mode, len(result.records), [_client_record(record) for record in result.records], result.counters.totals
    )


def _client_record(record: SimulatedRecord) -> RequestRecord:
    """Of the tokens between the first and the last the report reads the number only."""
    times_s = record.token_times_s
    chunks = [Chunk(times_s[0], 1)] if times_s else []
    if len(times_s) > 1:
        chunks.append(Chunk(times_s[-1], len(times_s) - 1))
    # errors that differ by a request's numbers alone are counted together
    error = None if record.error is None else re.sub(r"\d+(\.\d+)?", "N", record.error)
    return RequestRecord(record.index, record.sent_s, record.ended_s, record.num_input_tokens, tuple(chunks), error)


def simulation_table(simulated: Sequence[SimulatedMode]) -> Table:
    """What a measurement from outside does not see, a column for each mode."""
    table = Table(title="Seen from inside")
    table.add_column("")
    for mode in simulated:
        table.add_column(mode.result.mode, justify="right")

    def add(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    summaries = [mode.summary for mode in simulated]
    for name in ("median", "p95", "p99"):
        add(f"queue s, {name}", *(_latency(summary.queue_s, name) for summary in summaries))
    if any(summary.good_share is not None for summary in summaries):
        add("goodput, requests/s", *(_number(summary.good_requests_per_s, ".3f") for summary in summaries))
        add("requests within the SLO", *(_number(summary.good_share, ".1%") for summary in summaries))
    add("recomputed tokens", *(str(summary.num_recomputed_tokens) for summary in summaries))
    add("prefix hit rate", *(_number(summary.prefix_hit_rate, ".1%") for summary in summaries))
    add("replica seconds", *(f"{mode.replica_seconds:.1f}" for mode in simulated))
    add("simulated in s", *(f"{mode.wall_s:.2f}" for mode in simulated))
    add("times real time", *(f"{mode.summary.wall_s / mode.wall_s:,.0f}" for mode in simulated))
    return table


def _latency(distribution: Distribution | None, name: str) -> str:
    return "-" if distribution is None else f"{getattr(distribution, name):.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_json(path: Path, values: object) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
