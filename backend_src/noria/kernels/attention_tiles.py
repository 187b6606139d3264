"""The inner loop of both attention kernels: queries of one key-value head against keys and values in paged blocks.

Softmax over tiles of BLOCK_N keys, kept as its state (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023):

    row_max = max_j s_j,    row_sum = sum_j 2^(s_j - row_max),    acc = sum_j 2^(s_j - row_max) v_j
    s_j = q . k_j * scale * log2(e),    with a soft cap c:  s_j = c tanh(q . k_j * scale / c) * log2(e)

A row of the tile is one head of one query: BLOCK_M rows are the heads of a group, which share their keys and values,
for as many queries as fit. Tiles lie at multiples of BLOCK_N and splits at multiples of SPLIT_KEYS keys, wherever a
query stands and whoever is beside it, and a tile of which a row sees nothing leaves the row's state as it is, bit for
bit.

Quantised keys and values (`kv_format`): the scale of a key multiplies its score, that of a value the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from noria.kernels.kv_format import is_quantised
from noria.kernels.language import gpu_capability, tl, triton

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
BLOCK_SIZES = (16, 32, 64, 128, 256)
# keys of one split of a decode; a unit of work reads 128 KB of keys and values at head_dim 128 in 16 bits
SPLIT_KEYS = 256
LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """block_m: rows, of which group * (block_m // group) are used. The others are triton.Config's.

    max_registers: of a thread; None lets the assembler aim at more programs side by side, for which it may spill.
    num_per_sm: programs of a decode that a multiprocessor holds, by the registers and shared memory that they take.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = 255
    num_per_sm: int = 1


# By padded head size. As large as fit without a spilled register and in 99 KB of shared memory on every GPU named in
# CAPABILITIES, which `tests/kernels/test_compiled_kernels.py` checks.
_FLOAT32 = {64: Tiles(16, 32, 4, 2, num_per_sm=2), 128: Tiles(16, 16, 8, 2, num_per_sm=2), 256: Tiles(16, 16, 8, 2)}
_DECODE = {64: Tiles(16, 128, 4, 3, None, 3), 128: Tiles(16, 64, 4, 3, None, 3), 256: Tiles(16, 32, 4, 3, None, 3)}
_DECODE_QUANTISED = {
    64: Tiles(16, 64, 4, 3, None, 3),
    128: Tiles(16, 32, 4, 3, None, 2),
    256: Tiles(16, 16, 4, 3, None, 2),
}
_PREFILL = {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 3)}
_PREFILL_QUANTISED = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)}
_PREFILL_AMPERE = {64: Tiles(128, 64, 8, 3), 128: Tiles(64, 64, 8, 3), 256: Tiles(64, 32, 8, 2)}
_PREFILL_QUANTISED_AMPERE = {64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 32, 8, 2)}
# of both kernels, which must then use the same matrix instruction and the same order of sums
_DETERMINISTIC = {64: Tiles(32, 64, 8, 3), 128: Tiles(32, 64, 8, 3), 256: Tiles(32, 32, 8, 2)}
_DETERMINISTIC_QUANTISED = {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(32, 32, 8, 2)}


def decode_tiles(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, is_deterministic: bool) -> Tiles:
    if dtype == torch.float32 or is_deterministic:
        return prefill_tiles(dtype, kv_dtype, head_dim, is_deterministic)
    return (_DECODE_QUANTISED if is_quantised(kv_dtype) else _DECODE)[padded_dim(head_dim)]


def prefill_tiles(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, is_deterministic: bool) -> Tiles:
    if dtype == torch.float32:
        table = _FLOAT32
    elif is_deterministic:
        table = _DETERMINISTIC_QUANTISED if is_quantised(kv_dtype) else _DETERMINISTIC
    elif gpu_capability() < 90:
        table = _PREFILL_QUANTISED_AMPERE if is_quantised(kv_dtype) else _PREFILL_AMPERE
    else:
        table = _PREFILL_QUANTISED if is_quantised(kv_dtype) else _PREFILL
    return table[padded_dim(head_dim)]


def padded_dim(head_dim: int) -> int:
    """A tile's width: the power of two that holds a head."""
    return 1 << (head_dim - 1).bit_length()


def check_supported(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    """Raises ValueError, naming the field and what the attention kernels know."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    if dtype not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(map(str, dtypes))}, not {dtype}")
    if kv_dtype != dtype and not (is_quantised(kv_dtype) and dtype != torch.float32):
        others = "" if dtype == torch.float32 else ", int8 or float8_e4m3fn"
        raise ValueError(f"kv_cache_dtype must be {dtype}{others} beside dtype {dtype}, not {kv_dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}")
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"num_heads / num_kv_heads must be from 1 to {MAX_GROUP}, not {group}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")


@triton.jit
def _load_heads(pointers, is_read, dims, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, IS_MASKED: tl.constexpr):
    """[keys, DIM] from pointers [keys]; a mask only where something is left out, for the registers it takes."""
    places = pointers[:, None] + dims[None, :]
    if HEAD_DIM == DIM:
        if IS_MASKED:
            return tl.load(places, mask=is_read[:, None], other=0.0)
        else:
            return tl.load(places)
    else:
        return tl.load(places, mask=is_read[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def attend_tiles(
    q,  # [BLOCK_M, DIM]
    acc,  # [BLOCK_M, DIM] float32
    row_max,  # [BLOCK_M] float32
    row_sum,  # [BLOCK_M] float32
    row_begin,  # [BLOCK_M] int32: a row sees the keys [row_begin, row_end)
    row_end,  # [BLOCK_M] int32
    begin,  # keys of the loop, a multiple of BLOCK_N
    end,
    first_key,  # keys before it are not read
    block_table,  # the sequence's
    k_numbers,  # of the key-value head
    v_numbers,
    k_scales,
    v_scales,
    block_stride,  # int64, as the next three of numbers or scales
    slot_stride,
    scale_block_stride,
    scale_slot_stride,
    score_scale,  # scale * log2(e), or scale / soft cap
    KV_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0 is none
    IS_QUANTISED: tl.constexpr,
    IS_MASKED: tl.constexpr,  # some row may not see all keys of [begin, end)
):
    dims = tl.arange(0, DIM)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_read = (keys >= first_key) & (keys < end) if IS_MASKED else keys >= 0
        blocks = tl.load(block_table + keys // KV_BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        slots = blocks * block_stride + (keys % KV_BLOCK_SIZE) * slot_stride
        k = _load_heads(k_numbers + slots, is_read, dims, HEAD_DIM, DIM, IS_MASKED).T
        if IS_QUANTISED:
            scale_slots = blocks * scale_block_stride + (keys % KV_BLOCK_SIZE) * scale_slot_stride
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            scores *= tl.load(k_scales + scale_slots, mask=is_read, other=0.0)[None, :]
        else:
            scores = tl.dot(q, k, input_precision="ieee")
        scores *= score_scale
        if SOFT_CAP != 0:
            # tanh(x) = 1 - 2 / (1 + e^2x), which neither overflows nor loses its sign
            scores = (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * 2.8853900817779268)))
        if IS_MASKED:
            is_seen = (keys[None, :] >= row_begin[:, None]) & (keys[None, :] < row_end[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key yet: -inf - -inf would be NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = tl.fma(row_sum, decay, tl.sum(weights, 1))
        row_max = new_max
        v = _load_heads(v_numbers + slots, is_read, dims, HEAD_DIM, DIM, IS_MASKED)
        acc *= decay[:, None]
        if IS_QUANTISED:
            # not the weights times the scales: in float16 the product of a small scale and a weight has few bits left
            scales = tl.load(v_scales + scale_slots, mask=is_read, other=0.0)
            v = (v.to(tl.float32) * scales[:, None]).to(q.dtype)
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def merge(acc, row_max, row_sum, other_acc, other_max, other_sum):
    """The state over the keys of two states, the first over earlier keys. acc [..., dims], the others [...]."""
    new_max = tl.maximum(row_max, other_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay, other_decay = tl.exp2(row_max - shift), tl.exp2(other_max - shift)
    # written out as fused, so that every kernel that merges rounds alike
    acc = tl.fma(other_acc, tl.expand_dims(other_decay, -1), acc * tl.expand_dims(decay, -1))
    row_sum = tl.fma(other_sum, other_decay, row_sum * decay)
    return acc, new_max, row_sum


@triton.jit
def normalise(acc, row_sum):
    """acc / row_sum; zeros where no key was seen."""
    return acc / tl.expand_dims(tl.where(row_sum == 0.0, 1.0, row_sum), -1)


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, begins: Sequence[int], ends: Sequence[int], cap: float
) -> Tensor:
    """The definition, in the dtype of q [queries, num_heads, head_dim], of one sequence's queries.

    k, v [blocks, block_size, num_kv_heads, head_dim]; query i sees the positions [begins[i], ends[i]).
    """
    out = torch.zeros_like(q)
    k, v = (x[block_table.long()].flatten(0, 1) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    for query, begin, end in zip(range(len(q)), begins, ends, strict=True):
        if begin >= end:
            continue
        keys, values = (x[begin:end].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,jhd->hj", q[query], keys) * q.shape[-1] ** -0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out[query] = torch.einsum("hj,jhd->hd", scores.softmax(-1), values)
    return out
