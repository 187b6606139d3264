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
from noria_bench.records import Outcome, RequestRecord
from noria_bench.reporting.intervals import t_975
from noria_bench.results import Capacity, Run
from noria_bench.slo import STATISTICS, Slo, latency_figure, parse_slo
from noria_bench.workload import Workload


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


def slos_of(workload: Workload, slo: Slo | None) -> dict[str, Slo]:
    """By class; a class's own go before those of the command line."""
    slos = {one.name: slo if one.slo is None else parse_slo(one.slo) for one in workload.classes}
    return {name: own for name, own in slos.items() if own is not None}


def probe_of(rate: float, slos: Mapping[str, Slo], run: Run, records: Sequence[RequestRecord]) -> Probe:
    """The class that keeps its objectives worst decides. slos: by request class; a class without one is not judged.

    Requests that the workload cancels on purpose are not judged either. Raises BenchError where an SLO asks for a queue
    time that the server does not tell.
    """
    worst = [
        slo.worst({key: _figure(key, run, judged) for key in slo.limits_s})
        for name, slo in slos.items()
        if (judged := [record for record in records if record.request_class == name and _is_judged(record)])
    ]
    key, excess = max(worst, key=lambda pair: pair[1], default=("", 0.0))
    return Probe(rate, key, excess)


def _is_judged(record: RequestRecord) -> bool:
    return not record.is_warm_up and record.outcome is not Outcome.CANCELLED


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
    num_unfinished = sum(not record.has_succeeded for record in records)
    if num_unfinished > len(records) * (1 - float(STATISTICS[statistic] or 100) / 100):
        # the server's histogram knows nothing of those that never ran
        return math.inf
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


def capacity_of(label: str, slo: str, brackets: Sequence[Bracket]) -> Capacity:
    """Of the brackets of all repeats: the mean of the kept rates' logarithms, with Student's interval, and no narrower
    than the brackets themselves. One repeat alone has no interval but its bracket."""
    keys = [bracket.broken_by for bracket in brackets if bracket.broken_by is not None]
    broken_by = max(set(keys), key=keys.count) if keys else None
    num_runs = sum(bracket.num_probes for bracket in brackets)
    kept = [bracket.kept for bracket in brackets if bracket.kept is not None]
    is_bounded = bool(brackets) and all(bracket.broken is not None for bracket in brackets)
    if not kept or len(kept) < len(brackets):
        return Capacity(label, slo, None, None, None, is_bounded, broken_by, num_runs, len(brackets))
    logs = np.log(kept)
    mean = float(np.mean(logs))
    margin = t_975(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    step = max(
        (math.log(b.broken / b.kept) for b in brackets if b.broken is not None and b.kept is not None), default=0.0
    )
    low, high = math.exp(mean - margin), math.exp(mean + max(margin, step)) if is_bounded else None
    return Capacity(label, slo, math.exp(mean), low, high, is_bounded, broken_by, num_runs, len(brackets))


def capacity_line(capacity: Capacity) -> str:
    """For example `inflight: 0.42 requests/s (95 % interval 0.38 to 0.46) keep ttft_p95=2; above, ttft_p95 breaks`."""
    if capacity.rate is None:
        return f"{capacity.label}: {capacity.broken_by} breaks at the lowest rate, at least once: {capacity.slo}"
    if capacity.high is None:
        return f"{capacity.label}: at least {capacity.rate:.3g} requests/s keep {capacity.slo}: the highest tried did"
    kind = "95 % interval" if capacity.num_repeats > 1 else "one repeat, which brackets it between"
    return (
        f"{capacity.label}: {capacity.rate:.3g} requests/s ({kind} {capacity.low:.3g} to {capacity.high:.3g}) keep "
        f"{capacity.slo}; above, {capacity.broken_by} breaks"
    )
