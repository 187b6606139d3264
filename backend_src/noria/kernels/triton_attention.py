"""AttentionPlan of the Triton kernels: which rows of a step go to which kernel, as tensors that all layers share.

Rows of one query go to `paged_decode`, all others to `paged_prefill`. The host works the tensors out from what it
scheduled and sends them in one copy; nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noria.kernels.attention_tiles import SPLIT_KEYS
from noria.kernels.paged_attention import AttentionPlan, AttentionRow, AttentionShape
from noria.kernels.paged_decode import DecodeRows, paged_decode
from noria.kernels.paged_prefill import PrefillTiles, paged_prefill, queries_per_tile
from noria.kernels.split_states import Workspace, empty_workspace
from noria.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """See AttentionPlan. decodes and workspace, or prefills, are None where a step has none."""

    shape: AttentionShape
    is_deterministic: bool
    decodes: DecodeRows | None
    workspace: Workspace | None
    prefills: PrefillTiles | None

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        shape = self.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.prefills is not None:
            paged_prefill(
                out,
                q,
                k_cache,
                v_cache,
                self.prefills,
                shape.num_kv_heads,
                shape.sliding_window,
                shape.soft_cap,
                self.is_deterministic,
            )
        if self.decodes is not None:
            assert self.workspace is not None
            paged_decode(
                out,
                q,
                k_cache,
                v_cache,
                self.decodes,
                self.workspace,
                shape.num_kv_heads,
                shape.soft_cap,
                self.is_deterministic,
            )
        return out


def plan_attention_triton(
    rows: Sequence[AttentionRow],
    k_cache: Tensor,
    shape: AttentionShape,
    dtype: torch.dtype,
    is_deterministic: bool = False,
) -> AttentionPlan:
    """As `plan_attention`. dtype: of the queries."""
    decodes = [row for row in rows if row.num_queries == 1]
    prefills = [row for row in rows if row.num_queries > 1]
    per_tile = queries_per_tile(dtype, k_cache.dtype, shape, is_deterministic)
    decode_arrays = decode_rows(decodes, len(decodes), shape.sliding_window) if decodes else ()
    prefill_arrays = _prefill_arrays(prefills, per_tile) if prefills else ()
    tensors = upload((*decode_arrays, *prefill_arrays), k_cache.device)
    workspace = None
    if decodes:
        num_units = int(decode_arrays[DecodeRows._fields.index("unit_starts")][-1])
        workspace = empty_workspace(max(1, num_units), shape.num_heads, shape.head_dim, k_cache.device)
    return TritonAttentionPlan(
        shape,
        is_deterministic,
        DecodeRows(*tensors[: len(decode_arrays)]) if decodes else None,
        workspace,
        PrefillTiles(*tensors[len(decode_arrays) :]) if prefills else None,
    )


def decode_rows(
    rows: Sequence[AttentionRow], num_rows: int, sliding_window: int | None
) -> tuple[NDArray[np.int32], ...]:
    """The fields of DecodeRows. num_rows: with rows that see no key behind the others."""
    missing = num_rows - len(rows)
    columns = [(row.query_start, row.first_position, row.context_len) for row in rows]
    tokens, positions, context_lens = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    ends = np.minimum(positions + 1, context_lens)
    begins = np.zeros_like(ends) if sliding_window is None else np.clip(positions - sliding_window + 1, 0, ends)
    units = np.where(ends > begins, -(-ends // SPLIT_KEYS) - begins // SPLIT_KEYS, 0)
    # rows that are not there write their zeros to tokens of their own
    spare = np.arange(len(rows), num_rows)
    return (
        np.concatenate((tokens, spare)).astype(np.int32),
        np.pad(begins, (0, missing)).astype(np.int32),
        np.pad(ends, (0, missing)).astype(np.int32),
        np.concatenate(([0], np.pad(units, (0, missing)).cumsum())).astype(np.int32),
        *_block_tables(rows, num_rows),
    )


def _prefill_arrays(rows: Sequence[AttentionRow], per_tile: int) -> tuple[NDArray[np.int32], ...]:
    """The fields of PrefillTiles, int32. Long tiles come first: the last programs to run are then short ones."""
    columns = np.array(
        [(row.query_start, row.num_queries, row.first_position, row.context_len) for row in rows], dtype=np.int64
    )
    tiles = np.array(
        [(index, first) for index, row in enumerate(rows) for first in range(0, row.num_queries, per_tile)]
    )
    order = np.argsort(-(columns[tiles[:, 0], 2] + tiles[:, 1]), kind="stable")
    return (
        *columns.T.astype(np.int32),
        *_block_tables(rows, len(rows)),
        *tiles[order].T.astype(np.int32),
    )


def _block_tables(rows: Sequence[AttentionRow], num_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """table_starts [num_rows] and block_ids; the latter last, as it alone has another length at each step."""
    lengths = [len(row.block_table) for row in rows]
    starts = np.zeros(num_rows, dtype=np.int32)
    starts[: len(rows)] = np.cumsum([0, *lengths])[:-1]
    block_ids = np.fromiter(chain.from_iterable(row.block_table for row in rows), np.int32, sum(lengths))
    return starts, block_ids
