"""InputBatch: the scheduler's rows as the arrays that one forward pass and the sampler read.

Knows nothing of the model beyond the cache's block size, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.kernels.paged_attention import AttentionRow
from noria.kernels.upload import upload
from noria.models.decoder import DecoderInput
from noria.runtime.drawn_tokens import DrawnTokens
from noria.scheduler_output import PLACEHOLDER, SamplingInput, ScheduledSequence

NOTHING_DRAWN = DrawnTokens()


@dataclass(frozen=True, slots=True)
class InputBatch:
    """All rows' tokens, one row after the other, on the host.

    token_ids, positions, slots [tokens], logit_indices [rows that are sampled]: int64; see DecoderInput.
    sampled_request_ids, sampling_inputs: the rows whose next token is drawn, in the order of their logits.
    places: request id to index in token_ids of each placeholder; `drawn` is what the step before put in their stead.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_indices: NDArray[np.int64]
    rows: tuple[AttentionRow, ...]
    sampled_request_ids: tuple[int, ...]
    sampling_inputs: tuple[SamplingInput, ...]
    places: Mapping[int, int]
    drawn: DrawnTokens

    @classmethod
    def build(
        cls,
        rows: Sequence[ScheduledSequence],
        block_size: int,
        num_blocks: int,
        drawn: DrawnTokens = NOTHING_DRAWN,
    ) -> InputBatch:
        """num_blocks: of the pool; the slot after its last is where padding rows write."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention_rows: list[AttentionRow] = []
        sampled: list[tuple[int, int, SamplingInput]] = []
        places: dict[int, int] = {}
        for row in rows:
            attention_rows.append(_attention_row(row, query_start=len(token_ids)))
            row_positions = range(row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids))
            token_ids.extend(row.token_ids)
            positions.extend(row_positions)
            if row.token_ids[-1] == PLACEHOLDER:
                places[row.request_id] = len(token_ids) - 1
            if row.is_padding:
                slots.extend([num_blocks * block_size] * len(row_positions))
            else:
                slots.extend(row.block_table[p // block_size] * block_size + p % block_size for p in row_positions)
            if row.sampling is not None:
                sampled.append((row.request_id, len(token_ids) - 1, row.sampling))
        return cls(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            slots=np.array(slots, dtype=np.int64),
            logit_indices=np.array([index for _, index, _ in sampled], dtype=np.int64),
            rows=tuple(attention_rows),
            sampled_request_ids=tuple(request_id for request_id, _, _ in sampled),
            sampling_inputs=tuple(sampling for _, _, sampling in sampled),
            places=places,
            drawn=drawn,
        )

    def fill_in(self, token_ids: Tensor) -> None:
        """Puts drawn tokens in place of the placeholders in token_ids [tokens], a copy on the device."""
        self.drawn.fill_in(token_ids, self.places)

    def decoder_input(self, device: torch.device) -> DecoderInput:
        """On the device, by one copy."""
        tensors = upload((self.token_ids, self.positions, self.slots, self.logit_indices), device)
        token_ids, positions, slot_mapping, logit_indices = tensors
        self.fill_in(token_ids)
        return DecoderInput(token_ids, positions, slot_mapping, self.rows, logit_indices)


def _attention_row(row: ScheduledSequence, query_start: int) -> AttentionRow:
    num_queries = len(row.token_ids)
    return AttentionRow(
        query_start=query_start,
        num_queries=num_queries,
        first_position=row.num_computed_tokens,
        context_len=row.num_computed_tokens + (0 if row.is_padding else num_queries),
        block_table=row.block_table,
    )
