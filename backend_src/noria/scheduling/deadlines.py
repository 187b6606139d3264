"""Which requests run out of time, and when. Seconds on a clock that the caller reads."""

from __future__ import annotations

import heapq
from collections.abc import Container, Sized
from typing import Protocol


class LiveIds(Container[int], Sized, Protocol):
    """The ids of the requests that have not ended."""


class Deadlines:
    """A heap of (deadline, request id). Requests that have ended since are left out."""

    def __init__(self, live: LiveIds) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    @property
    def next(self) -> float | None:
        """The earliest to come."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, deadline: float, request_id: int) -> None:
        # a deadline may lie years ahead of its request's end
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, request_id))

    def pop_passed(self, now: float) -> list[int]:
        """Ids of live requests whose deadline is `now` or was before."""
        passed = []
        while (deadline := self.next) is not None and deadline <= now:
            passed.append(heapq.heappop(self._heap)[1])
        return passed
