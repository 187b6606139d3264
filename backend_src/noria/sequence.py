"""A request as the client asked it, the sequence that the engine makes of it, and the ways it can end.

Knows nothing of batching policies, tensors or text. Python only, so that the scheduler stays importable anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from noria.sampling_params import SamplingParams


class FinishReason(str, Enum):
    """Why a sequence ended. `stop` and `length` are answers; the others are failures that the client is told of."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class SequenceStatus(Enum):
    """Where a sequence stands: waiting for a slot, running in one, or finished (see `Sequence.finish_reason`)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be continued once. A client's request with n answers or several prompts becomes several of these.

    request_id: unique in the engine's life.
    seed: 64 bits; with a token's position it fixes the random number that the token is drawn with.
    stop_token_ids: every token that ends the sequence, the model's end-of-sequence tokens included unless ignored.
    deadline: seconds on the engine's monotonic clock; None is no limit.
    batch_id: common to the requests that Triton, or the client, sent as one batch.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    batch_id: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request in the engine. Written by the scheduler alone.

    Progress is one counter: tokens [0, num_computed_tokens) have their keys and values in the cache, the rest of
    token_ids is known but still to be computed. Prefill, decode and recomputation differ in nothing else.

        |<--------- prompt --------->|<------ output ------>|
        |<-- num_computed_tokens -->|<-- to be computed --->|
    """

    request: Request
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
