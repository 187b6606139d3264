"""Sequences that wait for a slot, in order of arrival, up to a limit. Knows nothing of blocks or batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from noria.errors import Overloaded
from noria.sequence import Sequence


class WaitingQueue:
    """First come, first served. A preempted sequence comes back to the head: it arrived before all that still wait."""

    def __init__(self, max_size: int, max_tokens: int | None = None) -> None:
        self._max_size = max_size
        self._max_tokens = max_tokens
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting sequences have still to compute before their next one is drawn."""
        return self._num_tokens

    def add(self, sequence: Sequence) -> None:
        """To the tail. Raises Overloaded when a limit is reached."""
        if len(self._sequences) >= self._max_size:
            raise Overloaded(f"the waiting queue is full: max_queue_size is {self._max_size} requests; try again later")
        if self._max_tokens is not None and self._num_tokens + sequence.num_tokens > self._max_tokens:
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
