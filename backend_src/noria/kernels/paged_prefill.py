"""Causal attention of rows with several queries each over paged keys and values: the prompt chunks of a step.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h'] * scale) v[j, h'],    h' = h // group
    query i of a row stands at position p = first_position + i and sees j <= p, j < context_len, j > p - sliding_window

    q, out [tokens, num_heads, head_dim]; caches as in `kv_format`; rows and tiles as in PrefillTiles

FlashAttention-2 (Dao 2023) over a block table: one launch for rows of any lengths, one program for one tile of queries
and one key-value head. A tile holds all heads of a group for several queries:

    row m of the tile      0     1     2     3     4     5   ...      group = 3
    query, head           0,0   0,1   0,2   1,0   1,1   1,2

Which tiles there are the host knows, since it scheduled the chunks: nothing is read back from the device. Keys that all
queries of a tile see are read without a mask, the last ones with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noria.kernels.attention_tiles import (
    LOG2_E,
    SPLIT_KEYS,
    attend_reference,
    attend_tiles,
    merge,
    normalise,
    padded_dim,
    prefill_tiles,
)
from noria.kernels.kv_format import dequantised, is_quantised, paged_kv
from noria.kernels.language import tl, triton
from noria.kernels.paged_attention import AttentionShape


class PrefillTiles(NamedTuple):
    """Rows of several queries, and the tiles that they are cut into; all int32, contiguous, on the cache's device.

    query_starts, num_queries [rows]: tokens of the batch. first_positions, context_lens [rows]: see above.
    table_starts [rows], block_ids: the blocks of a row's positions 0 onwards are block_ids[table_start:].
    tile_rows, tile_queries [tiles]: the row of a tile, and which of the row's queries is its first.
    """

    query_starts: Tensor
    num_queries: Tensor
    first_positions: Tensor
    context_lens: Tensor
    table_starts: Tensor
    block_ids: Tensor
    tile_rows: Tensor
    tile_queries: Tensor


def queries_per_tile(dtype: torch.dtype, kv_dtype: torch.dtype, shape: AttentionShape, is_deterministic: bool) -> int:
    group = shape.num_heads // shape.num_kv_heads
    return prefill_tiles(dtype, kv_dtype, shape.head_dim, is_deterministic).block_m // group


@triton.jit
def _prefill_kernel(
    out_ptr,  # [tokens, num_heads, HEAD_DIM]
    q_ptr,  # [tokens, num_heads, HEAD_DIM]
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    query_starts_ptr,
    num_queries_ptr,
    first_positions_ptr,
    context_lens_ptr,
    table_starts_ptr,
    block_ids_ptr,
    tile_rows_ptr,
    tile_queries_ptr,
    q_stride,
    block_stride,
    slot_stride,
    head_stride,
    scale_block_stride,
    scale_slot_stride,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # 0: one pass over the keys; else as a decode merges its splits
    SLIDING_WINDOW: tl.constexpr,  # 0 is none
    SOFT_CAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    row = tl.load(tile_rows_ptr + tl.program_id(0))
    first_query = tl.load(tile_queries_ptr + tl.program_id(0))
    num_queries = tl.load(num_queries_ptr + row)
    context_len = tl.load(context_lens_ptr + row)
    first_position = tl.load(first_positions_ptr + row) + first_query

    rows = tl.arange(0, BLOCK_M)
    queries = rows // GROUP
    is_query = (queries < BLOCK_Q) & (first_query + queries < num_queries)
    positions = first_position + queries
    row_end = tl.where(is_query, tl.minimum(positions + 1, context_len), 0)
    row_begin = tl.zeros([BLOCK_M], dtype=tl.int32)
    first_key = 0
    if SLIDING_WINDOW:
        row_begin = tl.maximum(positions - SLIDING_WINDOW + 1, 0)
        first_key = tl.maximum(first_position - SLIDING_WINDOW + 1, 0)
    end = tl.minimum(first_position + tl.minimum(BLOCK_Q, num_queries - first_query), context_len)
    # keys before it are seen by every query of the tile
    seen_end = tl.minimum(first_position + 1, context_len) // BLOCK_N * BLOCK_N
    if SLIDING_WINDOW:
        seen_end = 0

    tokens = (tl.load(query_starts_ptr + row) + first_query).to(tl.int64) + queries
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM)
    is_number = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = tokens * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=is_number, other=0.0)
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    block_table = block_ids_ptr + tl.load(table_starts_ptr + row)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    k_scales_ptr += kv_head
    v_scales_ptr += kv_head
    block_stride = tl.cast(block_stride, tl.int64)
    scale_block_stride = tl.cast(scale_block_stride, tl.int64)

    if SPLIT == 0:
        begin = first_key // BLOCK_N * BLOCK_N
        for is_masked in tl.static_range(2):
            acc, row_max, row_sum = attend_tiles(
                q,
                acc,
                row_max,
                row_sum,
                row_begin,
                row_end,
                begin if is_masked == 0 else tl.maximum(begin, seen_end),
                seen_end if is_masked == 0 else end,
                first_key,
                block_table,
                k_ptr,
                v_ptr,
                k_scales_ptr,
                v_scales_ptr,
                block_stride,
                slot_stride,
                scale_block_stride,
                scale_slot_stride,
                score_scale,
                KV_BLOCK_SIZE,
                HEAD_DIM,
                DIM,
                BLOCK_N,
                SOFT_CAP,
                IS_QUANTISED,
                is_masked == 1,
            )
    else:
        for split in tl.range(first_key // SPLIT * SPLIT, end, SPLIT, num_stages=1):
            split_acc, split_max, split_sum = attend_tiles(
                q,
                tl.zeros([BLOCK_M, DIM], dtype=tl.float32),
                tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
                tl.zeros([BLOCK_M], dtype=tl.float32),
                row_begin,
                row_end,
                tl.maximum(split, first_key // BLOCK_N * BLOCK_N),
                tl.minimum(split + SPLIT, end),
                first_key,
                block_table,
                k_ptr,
                v_ptr,
                k_scales_ptr,
                v_scales_ptr,
                block_stride,
                slot_stride,
                scale_block_stride,
                scale_slot_stride,
                score_scale,
                KV_BLOCK_SIZE,
                HEAD_DIM,
                DIM,
                BLOCK_N,
                SOFT_CAP,
                IS_QUANTISED,
                True,
            )
            acc, row_max, row_sum = merge(acc, row_max, row_sum, split_acc, split_max, split_sum)
    out = normalise(acc, row_sum).to(out_ptr.dtype.element_ty)
    out_offsets = (tokens * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out, mask=is_number)


def paged_prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: PrefillTiles,
    num_kv_heads: int,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    is_deterministic: bool = False,
) -> None:
    """Writes the rows' tokens of `out`, which is contiguous; each token of q is, too.

    is_deterministic: a query's result has the bits that `paged_decode` gives it under the same flag.
    Shapes and dtypes that `check_supported` refuses are not checked.
    """
    num_heads, head_dim = q.shape[1:]
    if q.stride()[1:] != (head_dim, 1) or not out.is_contiguous():
        raise ValueError("q must be contiguous in its last two dimensions, and out in all")
    k, v = (paged_kv(cache, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
    shape = prefill_tiles(q.dtype, k_cache.dtype, head_dim, is_deterministic)
    scale = head_dim**-0.5
    _prefill_kernel[(len(tiles.tile_rows), num_kv_heads)](
        out,
        q,
        k.numbers,
        v.numbers,
        # never read where there are none
        k.numbers if k.scales is None else k.scales,
        v.numbers if v.scales is None else v.scales,
        tiles.query_starts,
        tiles.num_queries,
        tiles.first_positions,
        tiles.context_lens,
        tiles.table_starts,
        tiles.block_ids,
        tiles.tile_rows,
        tiles.tile_queries,
        q.stride(0),
        *k.numbers.stride()[:3],
        *((0, 0) if k.scales is None else k.scales.stride()[:2]),
        scale / soft_cap if soft_cap else scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=padded_dim(head_dim),
        KV_BLOCK_SIZE=k.numbers.shape[1],
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        SPLIT=SPLIT_KEYS if is_deterministic else 0,
        SLIDING_WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap,
        IS_QUANTISED=is_quantised(k_cache.dtype),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
    )


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: PrefillTiles,
    num_kv_heads: int,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """[tokens, num_heads, head_dim] in the dtype of q: the definition, a query at a time. Other tokens are zeros."""
    k, v = (dequantised(paged_kv(cache, num_kv_heads, q.shape[-1]), q.dtype) for cache in (k_cache, v_cache))
    out = torch.zeros_like(q)
    columns = (x.tolist() for x in tiles[:5])
    for start, num_queries, first_position, context_len, table_start in zip(*columns, strict=True):
        positions = range(first_position, first_position + num_queries)
        begins = [0 if sliding_window is None else max(0, p - sliding_window + 1) for p in positions]
        ends = [min(p + 1, context_len) for p in positions]
        table = tiles.block_ids[table_start : table_start + -(-context_len // k.shape[1])]
        tokens = slice(start, start + num_queries)
        out[tokens] = attend_reference(q[tokens], k, v, table, begins, ends, soft_cap)
    return out
