"""How fast requests end, to tell a refused client when to come back."""

from __future__ import annotations

from collections import deque

NUM_ENDS = 32


class Pace:
    """The times of the last requests' ends. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def note_end(self, now: float) -> None:
        self._ends.append(now)

    @property
    def retry_hint(self) -> str:
        """When a place in the queue will be free, in words: one is for each request that ends."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return "try again later"
        interval = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"a request ends every {interval:.1f} s or so; retry after {max(1, round(interval))} s"
