"""Attention of rows with one query each over paged keys and values: the decodes of a step.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h'] * scale) v[j, h'],    h' = h // group,  first_key <= j < context_len

    q, out [tokens, num_heads, head_dim]; caches as in `kv_format`; rows as in DecodeRows; a row without keys gets zeros

Flash-decoding (Dao et al. 2023): the keys of a row are cut at multiples of SPLIT_KEYS, so that how a row is cut depends
on that row alone; a unit of work is one split of one row for one key-value head, all heads of whose group stand in one
tile. A fixed number of programs shares the units, each finding its rows by lengths it reads on the device: one launch,
and one CUDA graph, serves any lengths. `split_states` then merges the splits of a row, from the first to the last.

Per unit head_dim + 2 float32 a head are written and read again, at head_dim 128 and a group of 4 in 16 bits 3 % of the
bytes of keys and values; a row of one split is written at once.
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
    decode_tiles,
    normalise,
    padded_dim,
)
from noria.kernels.kv_format import dequantised, is_quantised, paged_kv
from noria.kernels.language import IS_INTERPRETED, tl, triton
from noria.kernels.split_states import Workspace, merge_splits

_SMS_WITHOUT_GPU = 2 if IS_INTERPRETED else 132


class DecodeRows(NamedTuple):
    """Rows of one query each; all int32, contiguous, on the device of the cache, 16-byte aligned.

    query_indices [rows]: tokens of the batch.
    first_keys, context_lens [rows]: a row sees the positions [first_key, context_len).
    unit_starts [rows + 1]: splits of the rows before; the splits of a row are those of its keys that it sees.
    table_starts [rows], block_ids: the blocks of a row's positions 0 onwards are block_ids[table_start:].
    """

    query_indices: Tensor
    first_keys: Tensor
    context_lens: Tensor
    unit_starts: Tensor
    table_starts: Tensor
    block_ids: Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    out_ptr,  # [tokens, num_heads, HEAD_DIM]
    acc_ptr,  # [units, num_heads, DIM]
    stats_ptr,  # [units, num_heads, 2]
    q_ptr,  # [tokens, num_heads, HEAD_DIM]
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    query_indices_ptr,
    first_keys_ptr,
    context_lens_ptr,
    unit_starts_ptr,
    table_starts_ptr,
    block_ids_ptr,
    num_rows,
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
    ROWS: tl.constexpr,  # a power of two, num_rows or more
    KV_BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    row_ids = tl.arange(0, ROWS)
    unit_ends = tl.load(unit_starts_ptr + 1 + row_ids, mask=row_ids < num_rows, other=2147483647)
    num_units = tl.load(unit_starts_ptr + num_rows) * NUM_KV_HEADS
    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    is_head = heads < GROUP
    is_number = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    block_stride = tl.cast(block_stride, tl.int64)
    scale_block_stride = tl.cast(scale_block_stride, tl.int64)
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), num_stages=1):
        split, kv_head = unit // NUM_KV_HEADS, unit % NUM_KV_HEADS
        row = tl.sum((unit_ends <= split).to(tl.int32), 0)
        first_unit = tl.load(unit_starts_ptr + row)
        num_splits = tl.load(unit_starts_ptr + row + 1) - first_unit
        first_key = tl.load(first_keys_ptr + row)
        context_len = tl.load(context_lens_ptr + row)
        token = tl.load(query_indices_ptr + row).to(tl.int64)
        begin = (first_key // SPLIT + split - first_unit) * SPLIT
        end = tl.minimum(begin + SPLIT, context_len)
        # tiles of the first split that lie before a sliding window
        begin = tl.maximum(begin, first_key // BLOCK_N * BLOCK_N)

        head_ids = kv_head * GROUP + heads
        q = tl.load(q_ptr + token * q_stride + head_ids[:, None] * HEAD_DIM + dims[None, :], mask=is_number, other=0.0)
        acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, row_max, row_sum = attend_tiles(
            q,
            acc,
            row_max,
            row_sum,
            tl.full([BLOCK_M], 0, dtype=tl.int32) + first_key,
            tl.full([BLOCK_M], 0, dtype=tl.int32) + context_len,
            begin,
            end,
            first_key,
            block_ids_ptr + tl.load(table_starts_ptr + row),
            k_ptr + kv_head * head_stride,
            v_ptr + kv_head * head_stride,
            k_scales_ptr + kv_head,
            v_scales_ptr + kv_head,
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
        if num_splits == 1:
            out = normalise(acc, row_sum).to(out_ptr.dtype.element_ty)
            out_heads = token * NUM_KV_HEADS * GROUP + head_ids
            tl.store(out_ptr + out_heads[:, None] * HEAD_DIM + dims[None, :], out, mask=is_number)
        else:
            states = tl.cast(split, tl.int64) * NUM_KV_HEADS * GROUP + head_ids
            tl.store(acc_ptr + states[:, None] * DIM + dims[None, :], acc, mask=is_head[:, None])
            tl.store(stats_ptr + states * 2, row_max, mask=is_head)
            tl.store(stats_ptr + states * 2 + 1, row_sum, mask=is_head)


def paged_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: DecodeRows,
    workspace: Workspace,
    num_kv_heads: int,
    soft_cap: float = 0.0,
    is_deterministic: bool = False,
) -> None:
    """Writes the rows' tokens of `out`, which is contiguous; each token of q is, too. The workspace is overwritten.

    The workspace must hold unit_starts[-1] units. Shapes and dtypes that `check_supported` refuses are not checked.
    """
    num_heads, head_dim = q.shape[1:]
    if q.stride()[1:] != (head_dim, 1) or not out.is_contiguous():
        raise ValueError("q must be contiguous in its last two dimensions, and out in all")
    k, v = (paged_kv(cache, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
    num_rows = len(rows.context_lens)
    dim = padded_dim(head_dim)
    tiles = decode_tiles(q.dtype, k_cache.dtype, head_dim, is_deterministic)
    scale = head_dim**-0.5
    _decode_kernel[(num_programs(q.device, tiles.num_per_sm),)](
        out,
        workspace.acc,
        workspace.stats,
        q,
        k.numbers,
        v.numbers,
        # never read where there are none
        k.numbers if k.scales is None else k.scales,
        v.numbers if v.scales is None else v.scales,
        rows.query_indices,
        rows.first_keys,
        rows.context_lens,
        rows.unit_starts,
        rows.table_starts,
        rows.block_ids,
        num_rows,
        q.stride(0),
        *k.numbers.stride()[:3],
        *((0, 0) if k.scales is None else k.scales.stride()[:2]),
        scale / soft_cap if soft_cap else scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        ROWS=max(16, 1 << (num_rows - 1).bit_length()),
        KV_BLOCK_SIZE=k.numbers.shape[1],
        SPLIT=SPLIT_KEYS,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SOFT_CAP=soft_cap,
        IS_QUANTISED=is_quantised(k_cache.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    merge_splits(out, workspace, rows.query_indices, rows.unit_starts)


def num_programs(device: torch.device, num_per_sm: int) -> int:
    """Of the decode kernel; it does not change a result."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _SMS_WITHOUT_GPU
    return sms * num_per_sm


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: DecodeRows,
    num_kv_heads: int,
    soft_cap: float = 0.0,
) -> Tensor:
    """[rows, num_heads, head_dim] in the dtype of q (float64 for a close look): the definition, a row at a time."""
    k, v = (dequantised(paged_kv(cache, num_kv_heads, q.shape[-1]), q.dtype) for cache in (k_cache, v_cache))
    outs = []
    columns = (x.tolist() for x in (rows.query_indices, rows.first_keys, rows.context_lens, rows.table_starts))
    for token, first, end, table_start in zip(*columns, strict=True):
        table = rows.block_ids[table_start : table_start + -(-end // k.shape[1])]
        outs.append(attend_reference(q[token][None], k, v, table, [first], [end], soft_cap)[0])
    return torch.stack(outs)
