"""InputBatch: the scheduler's rows as the tensors that one forward pass and the sampler read.

Knows nothing of the model beyond the cache's block size, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from noria.kernels.paged_attention import AttentionRow
from noria.models.decoder import DecoderInput
from noria.scheduler_output import SamplingInput, ScheduledSequence


@dataclass(frozen=True, slots=True)
class InputBatch:
    """decoder_input: all rows' tokens, one row after the other.
    sampled_request_ids, sampling_inputs: the rows whose next token is drawn, in the order of their logits.
    """

    decoder_input: DecoderInput
    sampled_request_ids: tuple[int, ...]
    sampling_inputs: tuple[SamplingInput, ...]

    @classmethod
    def build(
        cls, rows: Sequence[ScheduledSequence], block_size: int, num_blocks: int, device: torch.device
    ) -> InputBatch:
        """num_blocks: of the pool; the slot after its last is where padding rows write."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention_rows: list[AttentionRow] = []
        sampled: list[tuple[int, int, SamplingInput]] = []
        for row in rows:
            attention_rows.append(_attention_row(row, query_start=len(token_ids)))
            row_positions = range(row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids))
            token_ids.extend(row.token_ids)
            positions.extend(row_positions)
            if row.is_padding:
                slots.extend([num_blocks * block_size] * len(row_positions))
            else:
                slots.extend(row.block_table[p // block_size] * block_size + p % block_size for p in row_positions)
            if row.sampling is not None:
                sampled.append((row.request_id, len(token_ids) - 1, row.sampling))

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            DecoderInput(
                token_ids=tensor(token_ids),
                positions=tensor(positions),
                slot_mapping=tensor(slots),
                rows=tuple(attention_rows),
                logit_indices=tensor([index for _, index, _ in sampled]),
            ),
            sampled_request_ids=tuple(request_id for request_id, _, _ in sampled),
            sampling_inputs=tuple(sampling for _, _, sampling in sampled),
        )


def _attention_row(row: ScheduledSequence, query_start: int) -> AttentionRow:
    num_queries = len(row.token_ids)
    return AttentionRow(
        query_start=query_start,
        num_queries=num_queries,
        first_position=row.num_computed_tokens,
        context_len=row.num_computed_tokens + (0 if row.is_padding else num_queries),
        block_table=row.block_table,
    )
