"""Turns a sequence and the tokens it was given into a row of the batch, as the runner reads it."""

from __future__ import annotations

from noria.scheduler_output import SamplingInput, ScheduledSequence
from noria.sequence import Sequence


def make_row(sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
    """`num_new_tokens` of its known tokens; one more is drawn if no known ones are left."""
    token_ids = sequence.token_ids
    start = sequence.num_computed_tokens
    stop = start + num_new_tokens
    sampling = _sampling(sequence) if stop == len(token_ids) else None
    return ScheduledSequence(sequence.request.request_id, token_ids[start:stop], start, sequence.block_table, sampling)


def make_padding_row(sequence: Sequence, block_size: int) -> ScheduledSequence:
    """A finished member of a closed batch, which is computed on with its last token."""
    held = min(sequence.num_computed_tokens, len(sequence.block_table) * block_size)
    return ScheduledSequence(
        sequence.request_id, sequence.token_ids[-1:], held, sequence.block_table, None, is_padding=True
    )


def _sampling(sequence: Sequence) -> SamplingInput:
    request = sequence.request
    params = request.params
    num_tokens = len(sequence.token_ids)
    is_too_short = num_tokens - sequence.num_prompt_tokens < params.min_tokens
    return SamplingInput(
        params,
        request.seed,
        num_tokens,
        request.prompt_token_ids,
        sequence.output_token_ids if params.has_penalties else (),
        sorted(request.stop_token_ids) if is_too_short else (),
    )
