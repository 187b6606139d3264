"""One step while it is being decided: what has been given to whom, and what is left. Knows no policy."""

from __future__ import annotations

import sys

from noria.sequence import Sequence


class StepPlan:
    """Tokens by request id under two budgets; None is no budget.

    max_tokens: of the whole step. max_prefill_tokens: the part that prompts may take.
    """

    def __init__(self, max_tokens: int | None, max_prefill_tokens: int | None) -> None:
        self.num_tokens: dict[int, int] = {}
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.swapped_out: list[Sequence] = []
        self.num_prefix_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_lost_tokens = 0
        self._num_left = sys.maxsize if max_tokens is None else max_tokens
        self._max_prefill_tokens = sys.maxsize if max_prefill_tokens is None else max_prefill_tokens

    @property
    def prefill_budget(self) -> int:
        """Tokens that prompts may still take, before any is given to them."""
        return min(self._num_left, self._max_prefill_tokens)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens[sequence.request.request_id] = num_tokens
        self._num_left -= num_tokens

    def take_back(self, sequence: Sequence) -> None:
        """The sequence does not run in this step after all."""
        self._num_left += self.num_tokens.pop(sequence.request_id, 0)
