"""The highest rate that keeps an SLO: not the peak of throughput, but what one may promise.

Rates are doubled until the SLO breaks and then bisected, once for each repeat, whose workloads differ by their seed. A
rate counts as kept when every statistic of the SLO is, with requests that did not finish taken as infinitely slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noria_bench.errors import BenchError
from noria_bench.records import RequestRecord
from noria_bench.results import Capacity, Run
from noria_bench.slo import Slo, latency_figure

# two-sided 95 % of Student's t, by degrees of freedom; beyond the last the normal law's
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_Z95 = 1.96


@dataclass(frozen=True)
class Probe:
    """One rate tried. worst_key: the statistic worst kept; excess: as a multiple of its limit."""

    rate: float
    worst_key: str
    excess: float

    @property
    def is_kept(self) -> bool:
        return self.excess <= 1


@dataclass(frozen=True)
class Bracket:
    """The highest rate that was kept and the lowest above it that was not, either None if there was none."""

    kept: float | None
    broken: float | None
    broken_by: str | None
    num_probes: int


def probe_of(rate: float, slo: Slo, run: Run, records: Sequence[RequestRecord]) -> Probe:
    """Raises BenchError where the SLO asks for a queue time that the server does not tell."""
    measured = [record for record in records if not record.is_warm_up]
    key, excess = slo.worst({key: _figure(key, run, measured) for key in slo.limits_s})
    return Probe(rate, key, excess)


def _figure(key: str, run: Run, records: Sequence[RequestRecord]) -> float:
    latency, _, statistic = key.rpartition("_")
    if latency != "queue":
        return latency_figure(records, key)
    queue_s = None if run.summary.server is None else run.summary.server.queue_s
    names: Mapping[str, str] = {"p50": "median", "p95": "p95", "p99": "p99"}
    if queue_s is None or statistic not in names:
        raise BenchError(
            f"--slo: {key} cannot be had: the server tells p50, p95 and p99 through its metrics, or nothing"
        )
    return float(getattr(queue_s, names[statistic]))


def find_bracket(try_rate: Callable[[float], Probe], low: float, high: float, resolution: float) -> Bracket:
    """Doubles from `low` until a rate breaks the SLO or `high` keeps it; then halves the step, by ratio, until kept and
    broken are within 1 + resolution of each other."""
    kept: float | None = None
    broken: Probe | None = None
    num_probes = 0
    rate = low
    while broken is None and (kept is None or kept < high):
        probe = try_rate(rate)
        num_probes += 1
        if probe.is_kept:
            kept, rate = rate, min(2 * rate, high)
        else:
            broken = probe
    while kept is not None and broken is not None and broken.rate / kept > 1 + resolution:
        probe = try_rate(math.sqrt(kept * broken.rate))
        num_probes += 1
        if probe.is_kept:
            kept = probe.rate
        else:
            broken = probe
    return Bracket(kept, broken.rate if broken else None, broken.worst_key if broken else None, num_probes)


def capacity_of(label: str, slo: Slo, brackets: Sequence[Bracket]) -> Capacity:
    """Of the brackets of all repeats: the mean of the kept rates' logarithms, with Student's interval, and no narrower
    than the brackets themselves. One repeat alone has no interval but its bracket."""
    keys = [bracket.broken_by for bracket in brackets if bracket.broken_by is not None]
    broken_by = max(set(keys), key=keys.count) if keys else None
    num_runs = sum(bracket.num_probes for bracket in brackets)
    kept = [bracket.kept for bracket in brackets if bracket.kept is not None]
    is_bounded = bool(brackets) and all(bracket.broken is not None for bracket in brackets)
    if not kept or len(kept) < len(brackets):
        return Capacity(label, str(slo), None, None, None, is_bounded, broken_by, num_runs)
    logs = np.log(kept)
    mean = float(np.mean(logs))
    margin = _t95(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    step = max(
        (math.log(b.broken / b.kept) for b in brackets if b.broken is not None and b.kept is not None), default=0.0
    )
    low, high = math.exp(mean - margin), math.exp(mean + max(margin, step)) if is_bounded else None
    return Capacity(label, str(slo), math.exp(mean), low, high, is_bounded, broken_by, num_runs)


def _t95(num_degrees: int) -> float:
    return _T95[num_degrees - 1] if num_degrees <= len(_T95) else _Z95
