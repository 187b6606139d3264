"""Sequences that wait for a slot, in order of arrival, up to a limit. Knows nothing of blocks or batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from noria.errors import Overloaded
from noria.sequence import Sequence


class WaitingQueue:
    """First come, first served. A preempted sequence comes back to the head: it arrived before all that still wait.

    max_size, max_tokens: limits in sequences and in their tokens; None is no limit.
    """

    def __init__(self, max_size: int | None, max_tokens: int | None = None) -> None:
        self._max_size = max_size
        self._max_tokens = max_tokens
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence, num_free_slots: int = 0) -> None:
        """To the tail. Raises Overloaded when a limit is reached.

        num_free_slots: sequences that will leave the queue at the next step, and do not count. One that is longer than
        max_tokens is taken when nobody waits, since it would never be otherwise.
        """
        if self._max_size is not None and len(self._sequences) >= self._max_size + num_free_slots:
            raise Overloaded(f"the waiting queue is full: max_queue_size is {self._max_size} requests; try again later")
        num_tokens = self._num_tokens + sequence.num_tokens
        if self._max_tokens is not None and self._sequences and num_tokens > self._max_tokens:
            raise Overloaded(
                f"the waiting queue is full: it holds {self._num_tokens} prompt tokens, this request has "
                f"{sequence.num_tokens}, max_queue_tokens is {self._max_tokens}; try again later"
            )
        self._insert(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """To the head, whatever the limits: a started request is not refused."""
        self._insert(sequence)
        self._sequences.move_to_end(sequence.request_id, last=False)

    def head(self) -> Sequence | None:
        return next(iter(self._sequences.values()), None)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._num_tokens -= sequence.num_tokens

    def _insert(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self._num_tokens += sequence.num_tokens
