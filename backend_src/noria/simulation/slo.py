"""A service-level objective: how long latencies may be, over all requests of a run. Knows nothing of configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noria.errors import ConfigError
from noria.simulation.records import Outcome, RequestRecord
from noria.simulation.summary import Objectives

# ttft, tpot, e2e, max_gap: of each request, see RequestRecord; icl: gaps between tokens of all requests in one pool
LATENCIES = ("ttft", "tpot", "e2e", "icl", "max_gap")
STATISTICS: Mapping[str, float | None] = {"p50": 50, "p95": 95, "p99": 99, "mean": None}
KEYS = tuple(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS)


@dataclass(frozen=True, slots=True)
class Slo:
    """limits_s: seconds by key, of KEYS."""

    limits_s: Mapping[str, float]

    def worst(self, figures: Mapping[str, float]) -> tuple[str, float]:
        """The key that is worst kept, and its figure as a multiple of its limit: at most 1 if all are kept."""
        return max(((key, figures[key] / limit) for key, limit in self.limits_s.items()), key=lambda pair: pair[1])

    def objectives(self) -> Objectives:
        """What each single request must keep to count as good; of several statistics of a latency the strictest.

        Raises ConfigError for icl, which is a latency of all requests together.
        """
        limits: dict[str, float] = {}
        for key, limit in self.limits_s.items():
            latency = key.rpartition("_")[0]
            if latency == "icl":
                raise ConfigError(f"--slo: {key} is of all requests together; a single one keeps max_gap or tpot")
            limits[f"{latency}_s"] = min(limit, limits.get(f"{latency}_s", math.inf))
        return Objectives(**limits)

    def __str__(self) -> str:
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits_s.items())


def parse_slo(text: str) -> Slo:
    """`ttft_p95=2,tpot_p95=0.25`. Raises ConfigError naming what is wrong and the keys there are."""
    limits_s: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in KEYS:
            raise ConfigError(f"--slo takes KEY=SECONDS,... with keys of {', '.join(KEYS)}, not {part!r}")
        try:
            limits_s[key] = float(value)
        except ValueError:
            limits_s[key] = math.nan
        if not 0 < limits_s[key] < math.inf:
            raise ConfigError(f"--slo: {key} must be a finite number of seconds above 0, not {value!r}")
    return Slo(limits_s)


def latency_figure(records: Sequence[RequestRecord], key: str) -> float:
    """Seconds; a request that was refused or ran out of time counts as one that took for ever.

    0 where no request can have the latency, such as the tpot of one token.
    """
    latency, _, statistic = key.rpartition("_")
    values: list[float] = []
    for record in records:
        if record.outcome is not Outcome.FINISHED:
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
