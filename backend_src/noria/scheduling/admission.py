"""Admission: what a sequence must be promised before it joins, and when waiting ones may join at all.

Small strategy objects that answer questions and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from noria.sequence import Sequence


class Admission(Protocol):
    """can_preempt: a running sequence may be driven out again, for want of blocks or by a more urgent one."""

    can_preempt: bool

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        """Tokens for which the sequence must have blocks promised when it joins."""


class MaxUtilization:
    """Join while the known tokens fit; when the blocks run out, preempt (TensorRT-LLM's MAX_UTILIZATION, vLLM).

    A sequence that was preempted max_preemptions times joins only with all that it may need, and then stays: however
    tight the pool, each request is driven out a bounded number of times.
    """

    can_preempt = True

    def __init__(self, max_preemptions: int) -> None:
        self._max_preemptions = max_preemptions

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        if sequence.num_preemptions >= self._max_preemptions:
            return sequence.max_num_tokens
        return sequence.num_tokens


class GuaranteedNoEvict:
    """Reserve prompt and max_tokens: a started request is never paused (TensorRT-LLM's GUARANTEED_NO_EVICT, Orca)."""

    can_preempt = False

    def num_reserved_tokens(self, sequence: Sequence) -> int:
        return sequence.max_num_tokens


class Insertion(Protocol):
    def may_insert(self, num_running: int, num_waiting: int, num_steps_without: int) -> bool:
        """Whether waiting sequences may join at this step. num_steps_without: since the last time that any did."""


class Immediate:
    """At every step."""

    def may_insert(self, num_running: int, num_waiting: int, num_steps_without: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class WaitingServedRatio:
    """TGI's rule: interrupt the decodes only for a group that is worth it, or that has waited long enough.

    waiting_served_ratio: waiting sequences for each running one. max_waiting_tokens: steps.
    """

    waiting_served_ratio: float
    max_waiting_tokens: int

    def may_insert(self, num_running: int, num_waiting: int, num_steps_without: int) -> bool:
        is_worth_it = num_waiting >= self.waiting_served_ratio * num_running
        return not num_running or is_worth_it or num_steps_without >= self.max_waiting_tokens
