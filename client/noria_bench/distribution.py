"""Percentiles of latencies.

They interpolate linearly between the closest ranks (Hyndman and Fan 1996, type 7; NumPy's default).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds."""

    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Of the values there are; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(*(float(value) for value in np.percentile(known, [50, 95, 99], method="linear")))
