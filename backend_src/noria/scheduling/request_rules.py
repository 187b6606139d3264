"""What a request must be like for this scheduler to be able to serve it, and what it gets where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noria.errors import InvalidRequest
from noria.sequence import Request


@dataclass(frozen=True, slots=True)
class RequestRules:
    """num_pool_tokens: of the KV cache. max_prefill_tokens: of one step, where prompts are computed whole; else None.

    max_batch_total_tokens: see EngineConfig. num_levels, default_level: of priority. uses_levels: False for closed
        batches, where the order is Triton's.
    default_timeout_s, level_timeouts_s: for requests without a deadline; the level's goes first.
    """

    num_pool_tokens: int
    max_prefill_tokens: int | None
    max_batch_total_tokens: int | None
    num_levels: int
    default_level: int
    uses_levels: bool
    default_timeout_s: float | None
    level_timeouts_s: Mapping[int, float]

    def check(self, request: Request) -> int:
        """The request's priority level. Raises InvalidRequest if it could never be served."""
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        sizes = f"the prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens})"
        if num_prompt_tokens + max_tokens > self.num_pool_tokens:
            raise InvalidRequest(f"{sizes} must fit into the KV cache of {self.num_pool_tokens} tokens")
        limit = self.max_batch_total_tokens
        if limit is not None and num_prompt_tokens + max_tokens > limit:
            raise InvalidRequest(f"{sizes} must fit into max_batch_total_tokens ({limit})")
        limit = self.max_prefill_tokens
        # whoever is preempted or paused has his output computed again together with his prompt
        if limit is not None and num_prompt_tokens + max_tokens - 1 > limit:
            raise InvalidRequest(f"{sizes} must fit into one step of {limit} tokens, as chunked_prefill is off")
        return self._level(request.params.priority)

    def deadline(self, request: Request, now: float) -> float | None:
        """By the level that the request names, also in a closed batch."""
        if request.deadline is not None:
            return request.deadline
        level = request.params.priority or self.default_level
        timeout_s = self.level_timeouts_s.get(level, self.default_timeout_s)
        return None if timeout_s is None else now + timeout_s

    def _level(self, priority: int) -> int:
        if priority > self.num_levels:
            raise InvalidRequest(
                f"priority must be from 1 to {self.num_levels}, or 0 for the default ({self.default_level}), "
                f"not {priority}"
            )
        return (priority or self.default_level) if self.uses_levels else 1
