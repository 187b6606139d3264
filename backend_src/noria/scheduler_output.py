"""The contract between the planes: what the scheduler decided for one step, and what the model made of it.

The scheduler writes a SchedulerOutput, the runner reads it and answers a StepResult. Neither imports the other.
Block tables in here belong to the scheduler and hold only until it is called again: a runner that has launched a step
and not computed it yet must have read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from noria.sampling_params import SamplingParams

# stands for a token that a launched step draws and whose value the scheduler does not know yet
PLACEHOLDER = -1


# There is one of the next two for each row at each step. They are as good as frozen; being it would triple the 0.4 us
# that it takes to make one.
@dataclass(slots=True)
class SamplingInput:
    """All that drawing one token needs, whatever the rest of the batch is.

    seed: the request's 64-bit seed.
    position: index in the sequence of the token to be drawn; with the seed it keys the random number.
    banned_token_ids: may not be drawn at this step (the stop tokens, before min_tokens are out).
    prompt_token_ids, output_token_ids: for the penalties; output_token_ids is empty when none applies.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class ScheduledSequence:
    """One row of the batch: `token_ids` are computed at positions num_computed_tokens onwards.

    token_ids: the last may be PLACEHOLDER: what the step submitted just before this one draws for the request.
    block_table: block ids that hold positions 0 onwards; enough for every position computed here.
    sampling: None when more known tokens follow, or for a padding row; else one token is drawn after the last.
    is_padding: a finished row of a closed batch. It is computed like any other, attends over its
        num_computed_tokens cached positions, but writes no keys or values and draws nothing.
    """

    request_id: int
    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    sampling: SamplingInput | None
    is_padding: bool = False


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The contents of one block, all layers, from the cache to the host pool (swap out) or back (swap in).

    source, target: block ids, each in its own pool.
    """

    source: int
    target: int
    is_swap_in: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `rows` in the order in which they stand in the batch.

    block_copies: carried out in this order before anything is computed.
    admitted_request_ids, preempted_request_ids: sequences that joined the batch in this step, and that were driven out
        of it; swapped_out_request_ids: those of the latter whose blocks went to the host pool.
    num_running, num_waiting: sequences after this decision.
    num_slots: sequences that a step may hold at most (max_num_seqs); what `slot_utilisation` divides by.
    num_allocated_blocks: blocks held by sequences, finished rows of a closed batch included.
    num_cached_blocks: blocks that no sequence holds, kept for the prefixes in them.
    num_prefix_tokens, num_prefix_hit_tokens: known tokens of the sequences admitted in this step, and how many of them
        were found in the prefix cache. num_lost_tokens: of those preempted earlier, how many are computed again.
    num_live_kv_tokens: tokens of unfinished sequences that have a slot once this step has run.
    """

    step: int
    rows: tuple[ScheduledSequence, ...]
    block_copies: tuple[BlockCopy, ...] = ()
    admitted_request_ids: tuple[int, ...] = ()
    preempted_request_ids: tuple[int, ...] = ()
    swapped_out_request_ids: tuple[int, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    num_allocated_blocks: int = 0
    num_cached_blocks: int = 0
    num_live_kv_tokens: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_lost_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for a row; log-probabilities are None and empty unless the request asked for them.

    rank: of the token among all by the model's own logits, 1 for the likeliest.
    top_logprobs: (token id, log-probability), likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Nothing could be drawn for a row (its logits were not finite, say). The other rows are not concerned."""

    message: str


# by request id, for every row that was to be sampled
StepResult = dict[int, SampledToken | RowFailure]


class PendingStep(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """Waits for it. Raises what went wrong with the whole step."""
