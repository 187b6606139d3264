"""A simulation in the words of a measurement, and a table of what it took."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from noria.errors import ConfigError
from noria.simulation.records import Outcome as SimulatedOutcome
from noria.simulation.records import RequestRecord as SimulatedRecord
from noria.simulation.summary import SimulationResult
from noria_bench.distribution import Distribution
from noria_bench.plain_run import plain_run
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.results import Run
from noria_bench.slo import Objectives

_OUTCOMES = {
    SimulatedOutcome.FINISHED: Outcome.FINISHED,
    SimulatedOutcome.REJECTED: Outcome.REJECTED,
    SimulatedOutcome.DEADLINE: Outcome.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class SimulatedMode:
    """run: as of a measurement. wall_s: of real time that the simulation took. replica_seconds: of virtual time."""

    run: Run
    wall_s: float
    replica_seconds: float

    @property
    def speed(self) -> float:
        """Times real time."""
        return self.run.summary.all.wall_s / self.wall_s

    def to_json(self) -> dict[str, Any]:
        own = {"speed": self.speed, "replica_seconds": self.replica_seconds}
        return self.run.to_json() | {"simulation": own}


def simulated_run(mode: str, result: SimulationResult, objectives: Objectives | None = None) -> Run:
    """As a measurement would have come out."""
    records = [_as_measured(record) for record in result.records]
    queue_s = Distribution.of(record.queue_s for record in result.records)
    by_class = None if objectives is None else {record.request_class: objectives for record in records}
    return plain_run(mode, records, result.counters.totals, queue_s, by_class)


def _as_measured(record: SimulatedRecord) -> RequestRecord:
    # errors that differ by a request's numbers alone are counted together
    error = None if record.error is None else re.sub(r"\d+(\.\d+)?", "N", record.error)
    return RequestRecord(
        index=record.index,
        sent_s=record.sent_s,
        ended_s=record.ended_s,
        num_input_tokens=record.num_input_tokens,
        chunks=tuple(Chunk(time_s, 1) for time_s in record.token_times_s),
        error=error,
        outcome=_OUTCOMES[record.outcome],
    )


def simulation_table(simulated: Sequence[SimulatedMode]) -> Table:
    """What it took, a column for each mode."""
    table = Table(title="The simulation itself")
    table.add_column("")
    for mode in simulated:
        table.add_column(mode.run.label, justify="right")
    table.add_row("replica seconds", *(f"{mode.replica_seconds:.1f}" for mode in simulated))
    table.add_row("simulated in s", *(f"{mode.wall_s:.2f}" for mode in simulated))
    table.add_row("times real time", *(f"{mode.speed:,.0f}" for mode in simulated))
    return table


def write_json(path: Path, values: object) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
