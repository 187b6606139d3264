"""Sequences that wait for a slot: levels that age, each with an order and limits. Knows no blocks or batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from noria.errors import Overloaded
from noria.scheduling.waiting_order import ArrivalOrder, WaitingOrder
from noria.sequence import Sequence


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Sequences that may wait, and their tokens; None is no limit."""

    max_size: int | None = None
    max_tokens: int | None = None


class WaitingQueue:
    """The head is the most urgent sequence; among equals, the one whose turn it is by the level's order.

    limit: of all levels together; level_limits: of single ones besides.
    make_order: of each level. is_fair: the order depends on what `charge` is told.
    ageing_s: a sequence counts as one level higher for each so many seconds since it came, so that nobody starves.
    """

    def __init__(
        self,
        limit: QueueLimit,
        num_levels: int = 1,
        level_limits: Mapping[int, QueueLimit] | None = None,
        ageing_s: float | None = None,
        make_order: Callable[[], WaitingOrder] = ArrivalOrder,
    ) -> None:
        self._limit = limit
        self._level_limits = level_limits or {}
        self._ageing_s = ageing_s
        self._orders = {level: make_order() for level in range(1, num_levels + 1)}
        self._num_sequences = dict.fromkeys(self._orders, 0)
        self._num_tokens = dict.fromkeys(self._orders, 0)
        self._num_preempted = 0
        self.is_fair = make_order is not ArrivalOrder

    @property
    def num_preempted(self) -> int:
        """Those among them that ran before."""
        return self._num_preempted

    @property
    def num_by_level(self) -> Mapping[int, int]:
        """How many wait, of every level."""
        return dict(self._num_sequences)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(self._num_tokens.values())

    def __len__(self) -> int:
        return sum(self._num_sequences.values())

    def __iter__(self) -> Iterator[Sequence]:
        for order in self._orders.values():
            yield from order

    def check_room(self, sequence: Sequence, num_free_slots: int, retry_hint: str) -> None:
        """Raises Overloaded when a limit is reached.

        num_free_slots: sequences that will leave the queue at the next step; so many do not count. One that is longer
        than max_tokens is taken when nobody else will wait, since it would never be otherwise.
        retry_hint: the end of the error's text.
        """
        own = self._level_limits.get(sequence.level, QueueLimit())
        num_own_tokens = self._num_tokens[sequence.level]
        level = f" of priority {sequence.level}"
        _check(self._limit, len(self), self.num_tokens, sequence.num_tokens, num_free_slots, "", retry_hint)
        num_own = self._num_sequences[sequence.level]
        _check(own, num_own, num_own_tokens, sequence.num_tokens, num_free_slots, level, retry_hint)

    def add(self, sequence: Sequence) -> None:
        """Whatever the limits: those are checked for new requests only, a started one is never refused."""
        self._orders[sequence.level].push(sequence)
        self._num_sequences[sequence.level] += 1
        self._num_tokens[sequence.level] += sequence.num_tokens
        self._num_preempted += sequence.num_preemptions > 0

    def remove(self, sequence: Sequence) -> None:
        self._orders[sequence.level].remove(sequence)
        self._num_sequences[sequence.level] -= 1
        self._num_tokens[sequence.level] -= sequence.num_tokens
        self._num_preempted -= sequence.num_preemptions > 0

    def head(self, now: float) -> Sequence | None:
        heads = [head for order in self._orders.values() if (head := self._level_head(order, now)) is not None]
        return min(heads, key=lambda head: (self.urgency(head, now), head.arrival), default=None)

    def urgency(self, sequence: Sequence, now: float) -> int:
        """The level that the sequence counts as by now, waiting or running; 1 is the most urgent."""
        return max(1, sequence.level - self._age(sequence, now))

    def _level_head(self, order: WaitingOrder, now: float) -> Sequence | None:
        """Whose turn it is, unless somebody of the level has aged more: a fair share is no reason to starve."""
        head, oldest = order.head(), order.oldest()
        if head is None or oldest is None or self._age(oldest, now) <= self._age(head, now):
            return head
        return oldest

    def _age(self, sequence: Sequence, now: float) -> int:
        """Levels gained by waiting or running."""
        return 0 if self._ageing_s is None else int((now - sequence.arrived_s) / self._ageing_s)

    def charge(self, sequence: Sequence, service: float) -> None:
        """Note what was done for the sequence's user, see `waiting_order.FairOrder`."""
        self._orders[sequence.level].charge(sequence.request.params.user, service)


def _check(
    limit: QueueLimit, num_sequences: int, num_tokens: int, num_new_tokens: int, num_free: int, level: str, hint: str
) -> None:
    if limit.max_size is not None and num_sequences >= limit.max_size + num_free:
        raise Overloaded(f"the waiting queue is full: max_queue_size{level} is {limit.max_size} requests; {hint}")
    if limit.max_tokens is not None and num_sequences > num_free and num_tokens + num_new_tokens > limit.max_tokens:
        raise Overloaded(
            f"the waiting queue is full: it holds {num_tokens} prompt tokens, this request has {num_new_tokens}, "
            f"max_queue_tokens{level} is {limit.max_tokens}; {hint}"
        )
