"""A Prometheus histogram, or how much it grew between two scrapes, and the percentiles that can be read off it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noria_bench.distribution import Distribution


@dataclass(frozen=True)
class Histogram:
    """counts: observations at most as large as each upper bound, the last of which is infinite. total: their sum."""

    counts: Mapping[float, float]
    total: float = 0.0

    def __sub__(self, earlier: Histogram) -> Histogram:
        counts = {bound: count - earlier.counts.get(bound, 0.0) for bound, count in self.counts.items()}
        return Histogram(counts, self.total - earlier.total)

    @property
    def num_observations(self) -> float:
        return self.counts.get(math.inf, 0.0)

    def quantile(self, share: float) -> float | None:
        """Linear within the bucket that holds it, in the last one its lower bound, as Prometheus' histogram_quantile.

        None without observations.
        """
        wanted = share * self.num_observations
        if not self.num_observations:
            return None
        lower, below = 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= wanted and count > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
            lower, below = bound, count
        return None

    def distribution(self) -> Distribution | None:
        values = [self.quantile(share) for share in (0.5, 0.95, 0.99)]
        known = [value for value in values if value is not None]
        return Distribution(*known) if len(known) == len(values) else None
