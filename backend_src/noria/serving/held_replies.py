"""Replies of which Triton has refused a response: what waits for them is bounded. Knows no Triton and no threads.

refused -> offered again every RETRY_S -> taken: forgotten here
   | more than max_unsent_bytes wait: its requests are paused, their slots and blocks are the others'
   | it stays so, or the end stays undelivered, for slow_reader_timeout_s: overdue, to be given up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noria.serving.reply import Reply

# an attempt that fails takes the writer 1 ms, which the others must not feel
RETRY_S = 0.1


@dataclass(slots=True)
class _Hold:
    """num_refused_bytes: of the response that was. stuck_since: when the reply was found above its bound, or ended."""

    num_refused_bytes: int
    next_attempt: float
    stuck_since: float | None = None
    is_paused: bool = False


class HeldReplies:
    """`pause` and `resume` are called with the ids of a reply's parts that have not ended."""

    def __init__(
        self,
        max_unsent_bytes: int,
        slow_reader_timeout_s: float,
        pause: Callable[[Sequence[int]], None],
        resume: Callable[[Sequence[int]], None],
    ) -> None:
        self._max_unsent_bytes = max_unsent_bytes
        self.slow_reader_timeout_s = slow_reader_timeout_s
        self._pause = pause
        self._resume = resume
        # by identity: a reply is one client's
        self._holds: dict[int, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, reply: Reply) -> bool:
        return id(reply) in self._holds

    def hold(self, reply: Reply, num_bytes: int, now: float) -> None:
        """A response of so many bytes was refused."""
        hold = self._holds.setdefault(id(reply), _Hold(num_bytes, now))
        hold.num_refused_bytes, hold.next_attempt = num_bytes, now + RETRY_S
        self.check_bound(reply, now)

    def check_bound(self, reply: Reply, now: float) -> None:
        """More of a reply that is held here has come, or its end."""
        hold = self._holds[id(reply)]
        is_above = hold.num_refused_bytes + reply.num_waiting_bytes > self._max_unsent_bytes
        if hold.stuck_since is None and (is_above or reply.is_finished):
            hold.stuck_since = now
        if is_above and not hold.is_paused and not reply.is_finished:
            hold.is_paused = True
            self._pause(reply.live_request_ids)

    def release(self, reply: Reply) -> None:
        """The response was taken, or the reply is over."""
        hold = self._holds.pop(id(reply), None)
        if hold is not None and hold.is_paused and not reply.is_finished:
            self._resume(reply.live_request_ids)

    def is_due(self, reply: Reply, now: float) -> bool:
        """To be offered again."""
        hold = self._holds.get(id(reply))
        return hold is not None and now >= hold.next_attempt

    def is_overdue(self, reply: Reply, now: float) -> bool:
        hold = self._holds.get(id(reply))
        if hold is None or hold.stuck_since is None:
            return False
        return now - hold.stuck_since >= self.slow_reader_timeout_s
