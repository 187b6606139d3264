"""How long a request waited and computed, noted by the engine's thread as it happens. Knows no clock: times are given.

arrived --queue--> first step --> first token --> token --max_gap--> token --> ended
|<---------------- ttft ------------------->|<------- tpot each ------->|
|<------------------------------- e2e ---------------------------------------->|
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.sequence import FinishReason


# there is one for each request; not frozen for the same reason as ScheduledSequence
@dataclass(slots=True)
class RequestTimings:
    """A request that has ended, in seconds. None is what it did not live to see.

    level: of priority, 1 is served first. queue_s: from its arrival to the start of its first step. ttft_s: from its
        arrival to its first token. tpot_s: (last token - first token) / (tokens - 1), of at least two. max_gap_s: the
        longest time between two of its tokens. e2e_s: from its arrival to its end.
    num_output_tokens: drawn, a stop token included.
    """

    level: int
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    max_gap_s: float | None
    e2e_s: float

    @property
    def is_answer(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


class RequestTimer:
    """Of one request that is live. Times are in seconds on the engine's clock."""

    __slots__ = (
        "_arrived_s",
        "_first_scheduled_s",
        "_first_token_s",
        "_last_token_s",
        "_max_gap_s",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "level",
        "num_preemptions",
    )

    def __init__(self, level: int, num_prompt_tokens: int, arrived_s: float) -> None:
        self.level = level
        self.num_preemptions = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._arrived_s = arrived_s
        self._first_scheduled_s: float | None = None
        self._first_token_s = 0.0
        self._last_token_s = 0.0
        self._max_gap_s = 0.0

    def note_scheduled(self, now: float) -> None:
        """It is in a step that starts at `now`, for the first time or again."""
        if self._first_scheduled_s is None:
            self._first_scheduled_s = now

    def note_token(self, now: float) -> None:
        if not self._num_output_tokens:
            self._first_token_s = now
        elif now - self._last_token_s > self._max_gap_s:
            self._max_gap_s = now - self._last_token_s
        self._last_token_s = now
        self._num_output_tokens += 1

    def end(self, now: float, reason: FinishReason) -> RequestTimings:
        num_tokens, scheduled_s = self._num_output_tokens, self._first_scheduled_s
        has_gaps = num_tokens > 1
        return RequestTimings(
            level=self.level,
            finish_reason=reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=num_tokens,
            num_preemptions=self.num_preemptions,
            queue_s=None if scheduled_s is None else scheduled_s - self._arrived_s,
            ttft_s=self._first_token_s - self._arrived_s if num_tokens else None,
            tpot_s=(self._last_token_s - self._first_token_s) / (num_tokens - 1) if has_gaps else None,
            max_gap_s=self._max_gap_s if has_gaps else None,
            e2e_s=now - self._arrived_s,
        )
