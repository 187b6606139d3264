"""How fast requests end, to tell a refused client when to come back."""

from __future__ import annotations

from collections import deque

NUM_ENDS = 32
WINDOW_S = 60.0


class Pace:
    """The times of the last requests' ends, as far as they are not long ago. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def note_end(self, now: float) -> None:
        self._ends.append(now)

    def retry_hint(self, now: float) -> str:
        """When a place in the queue will be free, in words: one is for each request that ends."""
        while self._ends and self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2 or now <= self._ends[0]:
            return "try again later"
        interval = (now - self._ends[0]) / (len(self._ends) - 1)
        return f"a request ends every {interval:.1f} s or so; retry after {max(1, round(interval))} s"
