"""In which order the sequences of one priority level leave the queue. Knows no limits and no levels."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from noria.sequence import Sequence

# service of a token: VTC's weights for input and output
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class WaitingOrder(Protocol):
    """Waiting sequences with a head. The cost of each call grows with the logarithm of their number at most."""

    def push(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def head(self) -> Sequence | None: ...

    def charge(self, user: str, service: float) -> None:
        """Note what was done for a user."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class ArrivalOrder:
    """First come, first served; one that comes back after a preemption has the place of its arrival."""

    def __init__(self) -> None:
        self._by_arrival: dict[int, Sequence] = {}
        # holds arrivals that have left since, until they come up
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_arrival.values())

    def push(self, sequence: Sequence) -> None:
        if len(self._heap) > 2 * len(self._by_arrival) + 16:
            self._heap = sorted(self._by_arrival)
        self._by_arrival[sequence.arrival] = sequence
        heapq.heappush(self._heap, sequence.arrival)

    def remove(self, sequence: Sequence) -> None:
        del self._by_arrival[sequence.arrival]

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0] not in self._by_arrival:
            heapq.heappop(self._heap)
        return self._by_arrival[self._heap[0]] if self._heap else None

    def charge(self, user: str, service: float) -> None:
        pass


class FairOrder:
    """The user who was served least comes next (Virtual Token Counter, OSDI'24); within a user, by arrival.

    A user who comes back after a while starts at the least counter of those who wait: idle time earns no credit.
    """

    def __init__(self) -> None:
        self._by_user: dict[str, ArrivalOrder] = {}
        self._service: dict[str, float] = {}
        # (service when noted, user), one for each user in _by_user; service only grows, so it is put right late
        self._heap: list[tuple[float, str]] = []
        self._floor = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._by_user.values())

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._by_user.values():
            yield from queue

    def push(self, sequence: Sequence) -> None:
        user = sequence.request.params.user
        if user not in self._by_user:
            self._settle()
            if self._heap:
                self._floor = self._heap[0][0]
            self._service[user] = max(self._service.get(user, 0.0), self._floor)
            self._by_user[user] = ArrivalOrder()
            heapq.heappush(self._heap, (self._service[user], user))
        self._by_user[user].push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._by_user[sequence.request.params.user].remove(sequence)

    def head(self) -> Sequence | None:
        self._settle()
        return self._by_user[self._heap[0][1]].head() if self._heap else None

    def charge(self, user: str, service: float) -> None:
        self._service[user] = self._service.get(user, self._floor) + service

    def _settle(self) -> None:
        """Bring a user who waits, at his present counter, to the top."""
        while self._heap:
            noted, user = self._heap[0]
            if not self._by_user[user]:
                heapq.heappop(self._heap)
                del self._by_user[user]
                self._floor = max(self._floor, noted)
                self._forget_idle_users()
            elif self._service[user] > noted:
                heapq.heapreplace(self._heap, (self._service[user], user))
            else:
                return

    def _forget_idle_users(self) -> None:
        """Those below the floor would be lifted to it anyway."""
        if len(self._service) > 2 * len(self._by_user) + 1024:
            self._service = {
                user: service
                for user, service in self._service.items()
                if user in self._by_user or service > self._floor
            }
