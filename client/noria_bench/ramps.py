"""Rates that change with time, and the times at which arrivals then come.

A process of one arrival a second is stretched so that its n-th arrival comes when the area beneath the rate's curve
has reached it: that keeps the process's own law of gaps (Poisson, gamma, constant) at every rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RampPiece:
    """From one rate to another, in requests a second, over so many seconds; in a line, or by equal factors.

    An exponential piece starts and ends above 0.
    """

    start_rate: float
    end_rate: float
    seconds: float
    is_exponential: bool = False

    @property
    def num_expected(self) -> float:
        """Arrivals on average: the area beneath the rate."""
        if self.is_exponential and self.start_rate != self.end_rate:
            return (self.end_rate - self.start_rate) * self.seconds / math.log(self.end_rate / self.start_rate)
        return (self.start_rate + self.end_rate) / 2 * self.seconds

    def time_of(self, area: float) -> float:
        """Seconds from the piece's start after which the area beneath the rate is so large.

        area: from 0 to num_expected.
        """
        if area <= 0:
            return 0.0
        if self.is_exponential and self.start_rate != self.end_rate:
            growth = math.log(self.end_rate / self.start_rate) / self.seconds
            return math.log1p(area * growth / self.start_rate) / growth
        slope = (self.end_rate - self.start_rate) / self.seconds
        # the root of start_rate * t + slope * t**2 / 2 = area, in the form that stands a slope of 0
        return 2 * area / (self.start_rate + math.sqrt(max(0.0, self.start_rate**2 + 2 * slope * area)))


def num_expected(pieces: Sequence[RampPiece]) -> float:
    """Arrivals that a ramp brings on average."""
    return sum(piece.num_expected for piece in pieces)


def ramp_times(arrivals: Iterable[float], pieces: Sequence[RampPiece]) -> list[float]:
    """Seconds at which a process's arrivals come in a ramp; those that the ramp ends before are left out.

    arrivals: in order, of the process at one arrival a second.
    """
    times: list[float] = []
    before, start = 0.0, 0.0
    remaining = iter(pieces)
    piece = next(remaining, None)
    for arrival in arrivals:
        while piece is not None and arrival >= before + piece.num_expected:
            before, start = before + piece.num_expected, start + piece.seconds
            piece = next(remaining, None)
        if piece is None:
            break
        times.append(start + piece.time_of(arrival - before))
    return times
