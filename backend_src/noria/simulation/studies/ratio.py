"""What continuous batching gains over static batching at equal slots, by how unlike the outputs' lengths are.

A static batch takes as long as its longest sequence; a slot of a continuous one is free for the next at once. Where
all requests are there from the start and a step takes the same time whatever is in it, the ratio is
E[max of B] / E[length].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noria.config import EngineConfig
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.requests import make_requests
from noria.simulation.simulator import Simulator
from noria.simulation.studies.study import Mark, Panel, Series, Study
from noria.simulation.summary import SimulationResult
from noria_bench.arrivals import all_at_once
from noria_bench.lengths import (
    ConstantLength,
    EmpiricalLength,
    ExponentialLength,
    LengthLaw,
    LognormalLength,
    UniformLength,
    draw_lengths,
)

LAWS: Mapping[str, LengthLaw] = {
    "constant": ConstantLength(128),
    "uniform ±50 %": UniformLength(64, 192),
    "Orca: uniform 1-128": UniformLength(1, 128),
    "Anyscale: cap 32": ExponentialLength(128, 32),
    "Anyscale: cap 128": ExponentialLength(128, 128),
    "Anyscale: cap 512": ExponentialLength(128, 512),
    "Anyscale: cap 1536": ExponentialLength(128, 1536),
    "lognormal, CV 2": LognormalLength(128, 2.0, cap=8192),
}
BATCH_SIZES = (4, 8, 16, 32, 64)
SIMULATED_BATCH_SIZES = (4, 16)
# that the static mode runs one after the other
NUM_BATCHES = 40
NUM_DRAWS = 200_000
SEED = 1
_FLAT = MeasuredCostModel(linear_table=((1, 1.0),))


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """mean, cv: of the law's lengths. predicted: E[max of B] / E[length].

    simulated: ratio of the output tokens per second while requests still wait for a slot; simulated_makespan: of the
        times until all have ended, in which the last long outputs run alone. None where it was not simulated.
    """

    law: str
    mean: float
    cv: float
    batch_size: int
    predicted: float
    simulated: float | None = None
    simulated_makespan: float | None = None


def ratio_study(other_laws: Mapping[str, LengthLaw]) -> Study:
    """other_laws: shown beside the ones above, such as a trace's."""
    points = ratio_points({**LAWS, **other_laws}, SIMULATED_BATCH_SIZES, NUM_BATCHES)
    pairs = [(point.simulated, point.predicted) for point in points if point.simulated is not None]
    errors = [abs(simulated / predicted - 1) for simulated, predicted in pairs]
    control = next(point for point in points if point.cv == 0 and point.simulated is not None)
    return Study(
        name="ratio",
        title="Continuous over static batching, by the spread of output lengths",
        setting=f"All requests at once, {NUM_BATCHES} static batches' worth, one-token prompts, every step takes as "
        "long as any other. Static is padded: a finished row keeps its slot until the batch ends.",
        findings=(
            f"With outputs of one length the ratio is {control.simulated:.2f}: the baseline is not crippled.",
            f"The real scheduler's ratios differ from E[max of B] / E[length] by {np.median(errors):.1%} in the "
            f"median, by {max(errors):.1%} at most (40 batches of a heavy-tailed law are a small sample).",
        ),
        points=points,
        panels=(_panel(points),),
    )


def ratio_points(
    laws: Mapping[str, LengthLaw], simulated_batch_sizes: Sequence[int], num_batches: int
) -> list[RatioPoint]:
    points = []
    for name, law in laws.items():
        draws = law.lengths if isinstance(law, EmpiricalLength) else draw_lengths(law, NUM_DRAWS, SEED)
        mean, deviation = float(np.mean(draws)), float(np.std(draws))
        for size in BATCH_SIZES:
            simulated: tuple[float, ...] = ()
            if size in simulated_batch_sizes:
                simulated = simulated_ratios(draw_lengths(law, num_batches * size, SEED + size), size)
            points.append(RatioPoint(name, mean, deviation / mean, size, ideal_ratio(draws, size), *simulated))
    return points


def ideal_ratio(lengths: Sequence[int], batch_size: int) -> float:
    """E[max of batch_size] / E[length] for draws from `lengths` with replacement.

    The largest of B draws is the i-th smallest of n values with probability (i / n)**B - ((i - 1) / n)**B.
    """
    ordered = np.sort(np.asarray(lengths, dtype=float))
    shares = np.linspace(0, 1, len(ordered) + 1) ** batch_size
    return float(ordered @ np.diff(shares) / ordered.mean())


def simulated_ratios(lengths: Sequence[int], batch_size: int) -> tuple[float, float]:
    """Continuous over static: tokens per second while requests wait, and the inverse of the makespans."""
    static, inflight = (_simulate(lengths, batch_size, mode) for mode in ("static", "inflight"))
    static_rate = sum(lengths) / static.wall_s
    return _waiting_rate(inflight) / static_rate, static.wall_s / inflight.wall_s


def _simulate(lengths: Sequence[int], batch_size: int, mode: str) -> SimulationResult:
    requests = make_requests(all_at_once(len(lengths)), [1] * len(lengths), lengths)
    config = EngineConfig(batching_mode=mode, max_num_seqs=batch_size, prefix_caching=False)
    # room for all to be as long as the longest, and for the headroom
    num_blocks = 2 * batch_size * (max(lengths) // config.block_size + 2)
    return Simulator(config, num_blocks, _FLAT).run(requests)


def _waiting_rate(result: SimulationResult) -> float:
    """Output tokens per second until the last request gets a slot."""
    end_s = max(record.first_scheduled_s or 0.0 for record in result.records)
    return sum(time_s <= end_s for record in result.records for time_s in record.token_times_s) / end_s


def _panel(points: Sequence[RatioPoint]) -> Panel:
    series = []
    for colour, size in enumerate(BATCH_SIZES):
        line = sorted((point for point in points if point.batch_size == size), key=lambda point: point.cv)
        cvs, ratios = [point.cv for point in line], [point.predicted for point in line]
        series.append(Series(f"{size} slots", cvs, ratios, colour, is_dashed=True))
        marks = [(point.cv, point.simulated) for point in line if point.simulated is not None]
        if marks:
            label = f"simulated, {size} slots"
            series.append(Series(label, [cv for cv, _ in marks], [ratio for _, ratio in marks], colour, Mark.POINTS))
    return Panel(
        title="throughput, continuous over static (dashed: E[max] / E[length])",
        x_label="coefficient of variation of the output length",
        y_label="ratio at equal slots",
        series=tuple(series),
        y_scale="log2",
        has_end_labels=True,
    )
