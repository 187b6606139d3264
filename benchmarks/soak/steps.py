"""How long the steps took that only decode, by how many sequences were in them, from an engine's recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from noria.timeline.recorded_trace import RecordedStep, RowKind


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds; percentiles interpolate linearly."""

    num_steps: int
    median_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @property
    def p99_over_median(self) -> float:
        return self.p99_ms / self.median_ms


def decode_times(steps: Iterable[RecordedStep]) -> dict[int, list[float]]:
    """Milliseconds of each step in which every row computed one token and none was part of a prompt that goes on, by
    the number of rows, ascending. Padding rows of closed batches count: they are computed."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.rows and all(row.num_tokens == 1 and row.kind is not RowKind.CHUNK for row in step.rows):
            times[len(step.rows)].append(1e3 * (step.ended_s - step.started_s))
    return dict(sorted(times.items()))


def step_times(times_ms: Sequence[float]) -> StepTimes:
    """Of at least one."""
    return StepTimes(len(times_ms), *map(float, np.percentile(times_ms, [50, 95, 99, 100])))
