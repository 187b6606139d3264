"""Ratios of two settings, figure by figure, with 95 % intervals, and by what right they have them.

Repeats that sent the same requests, by repeat and seed, are paired. Otherwise latencies are drawn again from the
requests of both sides, and figures of whole runs are compared over repeats that are not paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noria_bench.environment import differences
from noria_bench.records import RequestRecord
from noria_bench.reporting import figures as catalogue
from noria_bench.reporting.figures import Figure
from noria_bench.reporting.intervals import Estimate, paired_ratio, unpaired_ratio
from noria_bench.reporting.loaded import Family, Load, Setting, Source
from noria_bench.reporting.resample import Resample
from noria_bench.reporting.text import plain
from noria_bench.results import Run

FIGURES = (
    *catalogue.THROUGHPUT,
    *catalogue.LATENCY,
    *catalogue.QUEUE,
    *(catalogue.BY_KEY[key] for key in ("slot_utilisation", "mean_batch", "kv_waste", "kv_usage_max", "num_steps")),
)

_MAX_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class Side:
    """name: as shown. Its counted runs are what is compared."""

    name: str
    source: Source
    setting: Setting

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.setting.counted

    def records(self, runs: Sequence[Run]) -> list[RequestRecord]:
        return [record for run in runs for record in self.source.records(run)]


@dataclass(frozen=True, slots=True)
class Row:
    """base, other: means over the runs, or over all their requests where those were drawn again.

    ratio: other over base, None where a value is 0. method: of its interval. is_of_requests: it knows nothing of how
    runs differ.
    """

    figure: Figure
    base: float
    other: float
    ratio: Estimate | None
    method: str
    is_of_requests: bool = False

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return "no interval"
        if self.ratio.low <= 1 <= self.ratio.high:
            return "no difference shown"
        is_more = self.ratio.value > 1
        if self.figure.better == 0:
            word = "more" if is_more else "less"
        else:
            word = "better" if is_more == (self.figure.better > 0) else "worse"
        return f"{word}, in these runs" if self.is_of_requests else word


@dataclass(frozen=True, slots=True)
class Comparison:
    """notes: what a reader must know before believing it."""

    base: str
    other: str
    load: Load
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def comparisons_of(sources: Sequence[Source]) -> list[Comparison]:
    """Two results: each label of the second against the same label of the first, or the one label against the other.

    Otherwise, and where they share none, within each result: each label against the first. Always under the same load.
    """
    if len(sources) == 2:
        first, second = sources
        across = [
            (_side(first, one, sources), _side(second, other, sources))
            for one in first.settings
            for other in second.settings
            if one.load == other.load and (one.label == other.label or _has_one_label(first, second))
        ]
        if across:
            return [compare_sides(*pair) for pair in across]
    pairs = []
    for source in sources:
        for load in Family((source,)).loads:
            at = [setting for setting in source.settings if setting.load == load]
            pairs += [(_side(source, at[0], sources), _side(source, other, sources)) for other in at[1:]]
    return [compare_sides(*pair) for pair in pairs]


def compare_sides(base: Side, other: Side, figures: Sequence[Figure] = FIGURES) -> Comparison:
    is_same_workload = base.source is other.source or (
        base.source.workload_hash is not None and base.source.workload_hash == other.source.workload_hash
    )
    pairs = _pairs(base, other) if is_same_workload else []
    # a run without its counterpart would bring requests of its own
    runs = ([one for one, _ in pairs], [one for _, one in pairs]) if pairs else (base.runs, other.runs)
    if len(pairs) >= 2:
        rows = [_paired_row(figure, pairs) for figure in figures]
    else:
        resample = Resample(base.records(runs[0]), other.records(runs[1]), is_paired=bool(pairs))
        rows = [_unpaired_row(figure, runs, resample) for figure in figures]
    notes = [] if is_same_workload else ["The workloads differ, or cannot be told to be the same."]
    notes += _environment_notes(base, other)
    for side, compared in zip((base, other), runs, strict=True):
        num_left_out = len(side.setting.runs) - len(compared)
        if not side.setting.is_valid:
            notes.append(f"{side.name} has no valid run: its invalid ones are compared.")
        elif num_left_out:
            share = f"{num_left_out} of {len(side.setting.runs)}"
            notes.append(f"{side.name}: {share} runs are left out, as invalid or for want of one to pair with.")
    return Comparison(base.name, other.name, base.setting.load, tuple(row for row in rows if row), tuple(notes))


def _environment_notes(base: Side, other: Side) -> list[str]:
    if base.source is other.source:
        return []
    found = differences(base.source.result.environment, other.source.result.environment)
    more = [f"{len(found) - _MAX_DIFFERENCES} more differences."] if len(found) > _MAX_DIFFERENCES else []
    return [f"Measured elsewhere or with something else: {plain(one)}" for one in found[:_MAX_DIFFERENCES]] + more


def _side(source: Source, setting: Setting, sources: Sequence[Source]) -> Side:
    return Side(Family(tuple(sources)).name(source, setting), source, setting)


def _has_one_label(*sources: Source) -> bool:
    return all(len({setting.label for setting in source.settings}) == 1 for source in sources)


def _pairs(base: Side, other: Side) -> list[tuple[Run, Run]]:
    by_repeat = {(run.repeat, run.seed): run for run in other.runs}
    return [(run, by_repeat[run.repeat, run.seed]) for run in base.runs if (run.repeat, run.seed) in by_repeat]


def _values(runs: Sequence[Run], figure: Figure) -> list[float]:
    read = (figure.read(run, run.summary.all) for run in runs)
    return [value for value in read if value is not None and math.isfinite(value)]


def _paired_row(figure: Figure, pairs: Sequence[tuple[Run, Run]]) -> Row | None:
    both = [values for pair in pairs if len(values := _values(pair, figure)) == 2]
    if not both:
        return None
    base, other = [values[0] for values in both], [values[1] for values in both]
    means = float(np.mean(base)), float(np.mean(other))
    if min(*base, *other) <= 0:
        return Row(figure, *means, None, "none: a value is 0")
    method = f"t, {len(both)} paired repeats" if len(both) > 1 else "none: a single pair has it"
    return Row(figure, *means, paired_ratio(base, other), method)


def _unpaired_row(figure: Figure, runs: tuple[Sequence[Run], Sequence[Run]], resample: Resample) -> Row | None:
    values = [_values(of_side, figure) for of_side in runs]
    if not all(values):
        return None
    means = float(np.mean(values[0])), float(np.mean(values[1]))
    if min(map(min, values)) <= 0:
        return Row(figure, *means, None, "none: a value is 0")
    if figure.latency is not None and figure.statistic is not None and resample.has_records:
        accessor = catalogue.LATENCIES[figure.latency]
        drawn = resample.ratio(accessor, catalogue.PERCENTILES[figure.statistic])
        if drawn is not None:
            return Row(figure, *drawn, resample.method, is_of_requests=True)
    if min(map(len, values)) > 1:
        return Row(figure, *means, unpaired_ratio(*values), f"t, {len(values[0])} and {len(values[1])} repeats")
    return Row(figure, *means, unpaired_ratio(*values), "none: too few repeats")
