"""A service-level objective: how long latencies may be, over all requests of a run, and what one request must keep.

Knows nothing of configurations, nor whether requests were measured or simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from noria_bench.errors import BenchError
from noria_bench.latencies import Timed

# ttft, tpot, e2e, max_gap: of each request, see `latencies`; icl: gaps between pieces of all requests in one pool;
# queue: from arrival to the first step, which the server alone knows
LATENCIES = ("ttft", "tpot", "e2e", "max_gap", "icl", "queue")
PER_REQUEST = LATENCIES[:4]
STATISTICS: Mapping[str, float | None] = {"p50": 50, "p95": 95, "p99": 99, "mean": None}
KEYS = tuple(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS)

# MLPerf Inference's Llama-3.1-8B server and interactive scenarios (loadgen/mlperf.conf): 99th percentiles. The last is
# for a small model on two CPU cores.
PRESETS: Mapping[str, str] = {
    "mlperf-8b-server": "ttft_p99=2,tpot_p99=0.1",
    "mlperf-8b-interactive": "ttft_p99=0.5,tpot_p99=0.03",
    "cpu": "ttft_p95=2,tpot_p95=0.25",
}


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to be a good one, in seconds; None asks nothing. A request that cannot have a latency,
    such as the tpot of one token, keeps it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    max_gap_s: float | None = None

    def are_met_by(self, record: Timed) -> bool:
        """Never by a request that did not finish."""
        if not record.has_succeeded:
            return False
        limits = ((getattr(self, f.name), f.name) for f in fields(self))
        return all(limit is None or (getattr(record, name) or 0.0) <= limit for limit, name in limits)


@dataclass(frozen=True, slots=True)
class Slo:
    """limits_s: seconds by key, of KEYS."""

    limits_s: Mapping[str, float]

    def worst(self, figures: Mapping[str, float]) -> tuple[str, float]:
        """The key that is worst kept, and its figure as a multiple of its limit: at most 1 if all are kept."""
        return max(((key, figures[key] / limit) for key, limit in self.limits_s.items()), key=lambda pair: pair[1])

    def objectives(self) -> Objectives:
        """What each single request must keep to count as good; of several statistics of a latency the strictest.

        Raises BenchError for icl and queue, which no client sees of a single request.
        """
        limits: dict[str, float] = {}
        for key, limit in self.limits_s.items():
            latency = key.rpartition("_")[0]
            if latency not in PER_REQUEST:
                raise BenchError(
                    f"--slo: {key} is of all requests together; a single one keeps {', '.join(PER_REQUEST)}"
                )
            limits[f"{latency}_s"] = min(limit, limits.get(f"{latency}_s", math.inf))
        return Objectives(**limits)

    def per_request(self) -> Objectives | None:
        """`objectives`, without what is of all requests together; None where nothing is left."""
        limits_s = {key: s for key, s in self.limits_s.items() if key.rpartition("_")[0] in PER_REQUEST}
        return Slo(limits_s).objectives() if limits_s else None

    def __str__(self) -> str:
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits_s.items())


def parse_slo(text: str) -> Slo:
    """`ttft_p95=2,tpot_p95=0.25`, or the name of a preset. Raises BenchError naming what is wrong and what is valid."""
    limits_s: dict[str, float] = {}
    for part in PRESETS.get(text, text).split(","):
        key, _, value = part.strip().partition("=")
        if key not in KEYS:
            raise BenchError(
                f"--slo takes KEY=SECONDS,... with keys of {', '.join(KEYS)}, or one of {', '.join(PRESETS)}, "
                f"not {part!r}"
            )
        try:
            limits_s[key] = float(value)
        except ValueError:
            limits_s[key] = math.nan
        if not 0 < limits_s[key] < math.inf:
            raise BenchError(f"--slo: {key} must be a finite number of seconds above 0, not {value!r}")
    return Slo(limits_s)


def latency_figure(records: Sequence[Timed], key: str) -> float:
    """Seconds; a request that did not finish counts as one that took for ever.

    0 where no request can have the latency, such as the tpot of one token.
    """
    latency, _, statistic = key.rpartition("_")
    values: list[float] = []
    for record in records:
        if not record.has_succeeded:
            values.append(math.inf)
        elif latency == "icl":
            values += record.gaps_s
        elif (value := getattr(record, f"{latency}_s")) is not None:
            values.append(value)
    if not values:
        return 0.0
    percentile = STATISTICS[statistic]
    if percentile is None:
        return float(np.mean(values))
    if math.isinf(max(values)):
        # between a finite and an infinite one there is nothing
        return float(np.percentile(values, percentile, method="higher"))
    return float(np.percentile(values, percentile, method="linear"))
