"""In which order the sequences of one priority level leave the queue. Knows no limits and no levels."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from noria.sequence import Sequence

# service of a token: VTC's weights for input and output
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# of idle ones; of more, those who were served longest ago are forgotten
MAX_IDLE_USERS = 4096


class WaitingOrder(Protocol):
    """Waiting sequences with a head. The cost of each call grows with the logarithm of their number at most."""

    def push(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def head(self) -> Sequence | None:
        """Whose turn it is."""

    def oldest(self) -> Sequence | None:
        """Who came first."""

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

    def oldest(self) -> Sequence | None:
        return self.head()

    def charge(self, user: str, service: float) -> None:
        pass


class FairOrder:
    """The user who was served least comes next (Virtual Token Counter, OSDI'24); of equals, the first to arrive.

    A user who comes back after a while starts at the least counter of those who wait: idle time earns no credit.
    """

    def __init__(self) -> None:
        self._all = ArrivalOrder()
        self._by_user: dict[str, ArrivalOrder] = {}
        # the user who was served last at the end
        self._service: OrderedDict[str, float] = OrderedDict()
        # (service, arrival of the head, user); both only grow, but for a sequence that comes back, so entries are put
        # right when they come up. The valid one of a user is the one noted.
        self._heap: list[tuple[float, int, str]] = []
        self._noted: dict[str, tuple[float, int, str]] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def push(self, sequence: Sequence) -> None:
        user = sequence.request.params.user
        self._all.push(sequence)
        self._settle()
        if user not in self._by_user:
            if self._heap:
                self._floor = max(self._floor, self._heap[0][0])
            self._service[user] = max(self._service.get(user, 0.0), self._floor)
            self._by_user[user] = ArrivalOrder()
        self._by_user[user].push(sequence)
        noted = self._noted.get(user)
        if noted is None or sequence.arrival < noted[1]:
            self._note(user, sequence.arrival)

    def remove(self, sequence: Sequence) -> None:
        self._all.remove(sequence)
        self._by_user[sequence.request.params.user].remove(sequence)

    def head(self) -> Sequence | None:
        self._settle()
        return self._by_user[self._heap[0][2]].head() if self._heap else None

    def oldest(self) -> Sequence | None:
        return self._all.head()

    def charge(self, user: str, service: float) -> None:
        self._service[user] = self._service.get(user, self._floor) + service
        self._service.move_to_end(user)
        while len(self._service) - len(self._by_user) > MAX_IDLE_USERS:
            user, service = self._service.popitem(last=False)
            if user in self._by_user:
                self._service[user] = service

    def _note(self, user: str, arrival: int) -> None:
        self._noted[user] = (self._service[user], arrival, user)
        heapq.heappush(self._heap, self._noted[user])

    def _settle(self) -> None:
        """Bring a user who waits, at his present counter, to the top."""
        while self._heap:
            entry = service, _, user = self._heap[0]
            is_valid = self._noted.get(user) == entry
            head = self._by_user[user].head() if is_valid else None
            if head is not None and entry == (self._service[user], head.arrival, user):
                return
            heapq.heappop(self._heap)
            if not is_valid:
                continue
            del self._noted[user]
            if head is not None:
                self._note(user, head.arrival)
            else:
                del self._by_user[user]
                self._floor = max(self._floor, service)
