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
    """Where a sequence stands.

    waiting: for a slot, with nothing in the cache. swapped: waiting too, with what it had computed in the host pool.
    paused: set aside while its reader is slow; like waiting or swapped, but in no queue. running: in a slot.
    finished: see `Sequence.finish_reason`.
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    PAUSED = "paused"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be continued once. A client's request with n answers or several prompts becomes several of these.

    request_id: unique in the engine's life.
    seed: 64 bits; with a token's position it fixes the random number that the token is drawn with.
    stop_token_ids: every token that ends the sequence, the model's end-of-sequence tokens included unless ignored.
    deadline: seconds on the engine's monotonic clock; None is no limit of its own.
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

    token_ids: the last is PLACEHOLDER from the launch of the step that draws it until its result is there.
    level: priority level, 1 is served first. arrival: counts requests as they came; arrived_s: when, on the engine's
        clock. first_scheduled_s: when it first joined the batch.
    block_table, host_block_table: blocks of computed tokens, in the cache and, while swapped out, in the host pool.
    num_promised_blocks: the length that block_table may grow to without asking again.
    block_hashes: of the full blocks so far needed, for prefix caching; the first num_published_blocks are in the index.
    num_cached_tokens: found in the prefix cache when it last joined. num_preemptions: times it was driven out.
    num_dropped_tokens: computed before it was last driven out, and not kept. num_lost_tokens: how many of such had to
        be computed again, all preemptions together.
    """

    request: Request
    level: int = 1
    arrival: int = 0
    arrived_s: float = 0.0
    deadline: float | None = None
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)
    num_promised_blocks: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_dropped_tokens: int = 0
    num_lost_tokens: int = 0
    first_scheduled_s: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens at its longest: the prompt and max_tokens."""
        return self.num_prompt_tokens + self.request.params.max_tokens

    @property
    def is_complete(self) -> bool:
        """It has max_tokens and needs no further step, though the value of its last token may be still to come."""
        return len(self.token_ids) - self.num_prompt_tokens >= self.request.params.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
