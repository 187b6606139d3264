"""Requests for the simulator. A seed fixes what is drawn. Knows nothing of engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request, of known length.

    arrival_s: seconds of virtual time. max_tokens: what it asks for, where that is more than the num_output_tokens
        after which it ends by itself; None is just these.
    priority, user: see `SamplingParams`. timeout_s: see `noria.config`; it counts from when the engine takes the
        request, which in a closed mode is when its batch is formed.
    prompt_token_ids: None makes a prompt that shares no prefix with any other.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    user: str = ""
    timeout_s: float | None = None
    prompt_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"arrival_s must be a finite number from 0, not {self.arrival_s}")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < self.num_output_tokens:
            raise ValueError(f"max_tokens must be at least num_output_tokens, not {self.max_tokens}")
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != self.num_prompt_tokens:
            raise ValueError(f"prompt_token_ids must be num_prompt_tokens ids, not {len(self.prompt_token_ids)}")

    @property
    def max_output_tokens(self) -> int:
        """That the scheduler must reckon with."""
        return self.num_output_tokens if self.max_tokens is None else self.max_tokens


def make_requests(
    arrivals_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], max_tokens: int | None = None
) -> list[SimRequest]:
    """One request per place of the three sequences, which must be equally long."""
    return [
        SimRequest(arrival_s, num_prompt_tokens, num_output_tokens, max_tokens)
        for arrival_s, num_prompt_tokens, num_output_tokens in zip(arrivals_s, prompts, outputs, strict=True)
    ]


def with_shared_prefix(
    requests: Sequence[SimRequest], num_prefix_tokens: int, share: float, seed: int
) -> list[SimRequest]:
    """The requests, a `share` of which begin with the same tokens: num_prefix_tokens, or all but one where they have
    fewer. The others, and what follows the prefix, stay unlike each other."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share}")
    is_sharing = np.random.default_rng(seed).random(len(requests)) < share
    return [
        replace(request, prompt_token_ids=_prompt(index, request.num_prompt_tokens, num_prefix_tokens))
        if sharing
        else request
        for index, (request, sharing) in enumerate(zip(requests, is_sharing, strict=True))
    ]


def distinct_prompt(index: int, num_tokens: int) -> tuple[int, ...]:
    """Token ids of a prompt that begins unlike that of any other index."""
    return _prompt(index, num_tokens, 0)


def _prompt(index: int, num_tokens: int, num_prefix_tokens: int) -> tuple[int, ...]:
    # 0 fills, 1 and up tell requests apart
    num_shared = min(num_prefix_tokens, num_tokens - 1)
    return (0,) * num_shared + (index + 1,) + (0,) * (num_tokens - num_shared - 1)
