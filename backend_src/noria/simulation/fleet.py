"""Serves requests with several replicas behind a router, as many as an autoscaling rule asks for.

Each replica queues for itself: a request stays where the router sent it. Nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol

from noria.simulation.autoscaling import Autoscaling
from noria.simulation.records import RequestRecord, StepCounters
from noria.simulation.replica import Replica
from noria.simulation.requests import SimRequest
from noria.simulation.summary import SimulationResult


class Router(Protocol):
    def pick(self, replicas: Sequence[Replica]) -> int:
        """The place of the replica that gets the next request; `replicas` is not empty."""


class RoundRobin:
    def __init__(self) -> None:
        self._num_picked = 0

    def pick(self, replicas: Sequence[Replica]) -> int:
        self._num_picked += 1
        return (self._num_picked - 1) % len(replicas)


class LeastOutstandingTokens:
    """By the prompt and max_tokens of all requests that a replica has not ended; the first of equals."""

    def pick(self, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda place: replicas[place].num_outstanding_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaLife:
    """started_s: when it began to load, and to cost. ready_s: when it began to serve. stopped_s: when it was stopped,
    or the last request ended."""

    started_s: float
    ready_s: float
    stopped_s: float


@dataclass(frozen=True, slots=True)
class FleetResult:
    """lives: one for each replica, by the number that the requests' records have."""

    simulation: SimulationResult
    lives: tuple[ReplicaLife, ...]

    @property
    def replica_seconds(self) -> float:
        """What the fleet cost."""
        return sum(life.stopped_s - life.started_s for life in self.lives)


@dataclass(slots=True)
class _Member:
    replica: Replica
    started_s: float
    ready_s: float
    idle_since_s: float
    stopped_s: float | None = None


def run_fleet(
    requests: Sequence[SimRequest],
    build_replica: Callable[[int], Replica],
    num_replicas: int,
    router: Router,
    autoscaling: Autoscaling | None = None,
) -> FleetResult:
    """Until every request has ended.

    build_replica: makes an idle replica of the given number. num_replicas: that serve from the beginning; without
    autoscaling they stay as many. router: a fresh one for each run, it may remember.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
    return _Fleet(build_replica, num_replicas, router, autoscaling).run(requests)


class _Fleet:
    """The state of one run."""

    def __init__(
        self,
        build_replica: Callable[[int], Replica],
        num_replicas: int,
        router: Router,
        autoscaling: Autoscaling | None,
    ) -> None:
        self._build_replica = build_replica
        self._router = router
        self._autoscaling = autoscaling
        self._members: list[_Member] = []
        for _ in range(num_replicas):
            self._start(0.0, load_time_s=0.0)

    def run(self, requests: Sequence[SimRequest]) -> FleetResult:
        to_send = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_s))
        records: list[RequestRecord] = []
        next_check_s = self._autoscaling.interval_s if self._autoscaling else math.inf
        now = 0.0
        while len(records) < len(requests):
            arrival_s = requests[to_send[0]].arrival_s if to_send else math.inf
            # the longest-standing of those whose turn it is
            member = min(self._members, key=lambda member: member.replica.next_event_s)
            event_s = max(now, member.replica.next_event_s)
            if arrival_s <= min(event_s, next_check_s):
                now = arrival_s
                index = to_send.popleft()
                self._route(index, requests[index], now)
            elif self._autoscaling and next_check_s <= event_s:
                now = next_check_s
                next_check_s += self._autoscaling.interval_s
                self._scale(self._autoscaling, now)
            else:
                now = event_s
                records += member.replica.advance(now)
                member.idle_since_s = now
        records.sort(key=lambda record: record.index)
        counters = reduce(add, (member.replica.counters for member in self._members), StepCounters())
        lives = [
            ReplicaLife(m.started_s, m.ready_s, now if m.stopped_s is None else m.stopped_s) for m in self._members
        ]
        return FleetResult(SimulationResult(tuple(records), counters), tuple(lives))

    def _route(self, index: int, request: SimRequest, now: float) -> None:
        serving = self._serving(now)
        replica = serving[self._router.pick([member.replica for member in serving])].replica
        replica.submit(index, request, now)

    def _serving(self, now: float) -> list[_Member]:
        return [member for member in self._members if member.stopped_s is None and member.ready_s <= now]

    def _scale(self, rule: Autoscaling, now: float) -> None:
        serving = self._serving(now)
        num_paid = sum(member.stopped_s is None for member in self._members)
        num_wanted = rule.num_wanted([member.replica for member in serving])
        for _ in range(num_wanted - num_paid):
            self._start(now, rule.load_time_s)
        if num_wanted > len(serving):
            return
        # the newest first
        num_serving = len(serving)
        for member in reversed(serving):
            is_idle = member.replica.is_idle and now - member.idle_since_s >= rule.idle_s
            if is_idle and num_serving > rule.min_replicas:
                member.stopped_s = now
                num_serving -= 1

    def _start(self, now: float, load_time_s: float) -> None:
        ready_s = now + load_time_s
        replica = self._build_replica(len(self._members))
        self._members.append(_Member(replica, now, ready_s, idle_since_s=ready_s))
