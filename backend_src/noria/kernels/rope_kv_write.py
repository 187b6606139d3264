"""Rotary position embedding (Su et al. 2021) of queries and keys, and the write of keys and values into the cache.

Halves of a head are the pair that is turned (GPT-NeoX's and Hugging Face's convention):

    y[:half] = x[:half] * cos - x[half:] * sin,    y[half:] = x[half:] * cos + x[:half] * sin
    angle[token, i] = position[token] * inv_freq[i],    half = head_dim / 2

torch's operators compute it as y = x * cos + swap_halves(x) * signed_sin, three operations instead of nine, in x's
dtype; the kernel in float32, rounding once, to the dtype of queries and cache or to a quantised cache (`kv_format`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from noria.kernels.kv_format import LARGEST, as_number, is_quantised, paged_kv, scale_heads, write_tokens
from noria.kernels.language import IS_DEBUG, tl, triton

# numbers of halves of heads that one program takes: 8 for each thread of 2 warps
_TILE = 512
_HALF_PI = tl.constexpr(math.pi / 2)


class Rotation(NamedTuple):
    """Of one step's tokens, shared by all layers; both [tokens, 1, head_dim], the first half of signed_sin negated."""

    cos: Tensor
    signed_sin: Tensor


@triton.jit
def _rotation_kernel(
    turn_ptr: tl.tensor,  # [tokens, 2, HALF] float32, contiguous
    positions_ptr: tl.tensor,  # [tokens]
    inv_freq_ptr: tl.tensor,  # [HALF] float32
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(inv_freq_ptr + i, i < HALF, other=0.0)
    # Taylor's series within a quarter turn, in float64, which is what float32 can tell apart up to position 2^24.
    # The library's cosine keeps numbers in local memory, for angles beyond 1e5.
    x = angle.to(tl.float64)
    num_quarters = tl.floor(x * (1.0 / _HALF_PI) + 0.5)
    x -= num_quarters * _HALF_PI
    square = x * x
    sin_term, cos_term = x, tl.full(x.shape, 1.0, tl.float64)
    sin, cos = sin_term, cos_term
    for n in tl.static_range(1, 8):
        cos_term = cos_term * square * (-1.0 / ((2 * n - 1) * (2 * n)))
        sin_term = sin_term * square * (-1.0 / ((2 * n) * (2 * n + 1)))
        cos += cos_term
        sin += sin_term
    quarter = num_quarters.to(tl.int32) & 3
    is_odd = (quarter & 1) == 1
    turned_cos = tl.where(is_odd, sin, cos)
    turned_sin = tl.where(is_odd, cos, sin)
    turned_cos = tl.where((quarter == 1) | (quarter == 2), -turned_cos, turned_cos)
    turned_sin = tl.where(quarter >= 2, -turned_sin, turned_sin)
    ptrs = turn_ptr + token * (2 * HALF) + i
    tl.store(ptrs, turned_cos.to(tl.float32), i < HALF)
    tl.store(ptrs + HALF, turned_sin.to(tl.float32), i < HALF)


def rotation_triton(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, 2, head_dim / 2] float32 whatever `dtype` is, cosines before sines: for `rope_kv_write_triton`.

    positions [tokens] int64, below 2^24 to be exact; inv_freq [head_dim / 2] float32. Raises ValueError for others.
    """
    num_tokens, half = positions.numel(), inv_freq.numel()
    _check("positions", positions, (num_tokens,), torch.int64)
    _check("inv_freq", inv_freq, (half,), torch.float32)
    turn = inv_freq.new_empty(num_tokens, 2, half)
    if num_tokens == 0:
        return turn
    _rotation_kernel[(num_tokens,)](
        turn, positions, inv_freq, HALF=half, BLOCK_HALF=triton.next_power_of_2(half), num_warps=1
    )
    return turn


@triton.jit
def _load_halves(ptrs: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    return tl.load(ptrs, mask, other=0.0).to(tl.float32), tl.load(ptrs + HALF, mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptrs: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> None:
    tl.store(ptrs, as_number(first, ptrs.dtype.element_ty), mask)
    tl.store(ptrs + HALF, as_number(second, ptrs.dtype.element_ty), mask)


@triton.jit
def _write_slot(
    cache_ptr: tl.tensor,  # numbers: [blocks, KV_BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF], blocks BLOCK_STRIDE apart
    scales_ptr: tl.tensor,  # [blocks, KV_BLOCK_SIZE, NUM_KV_HEADS], blocks SCALE_BLOCK_STRIDE apart, or None
    slot: tl.tensor,
    first: tl.tensor,  # [BLOCK_KV, BLOCK_HALF] float32: the halves of each head, 0 outside `mask`
    second: tl.tensor,
    heads: tl.tensor,  # [BLOCK_KV]
    offsets: tl.tensor,  # [BLOCK_KV, BLOCK_HALF] of the first half within a token
    mask: tl.tensor,
    head_mask: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_BLOCK_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    block = slot // KV_BLOCK_SIZE
    row = (slot - block * KV_BLOCK_SIZE) * NUM_KV_HEADS
    if scales_ptr is not None:
        first, second, scales = scale_heads(first, second, LARGEST)
        tl.store(scales_ptr + (block * SCALE_BLOCK_STRIDE + row) + heads, scales, head_mask)
    _store_halves(cache_ptr + (block * BLOCK_STRIDE + row * (2 * HALF)) + offsets, first, second, mask, HALF)


@triton.jit
def _rope_kv_write_kernel(
    q_ptr: tl.tensor,  # [tokens, NUM_HEADS, 2 * HALF] contiguous
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scales_ptr: tl.tensor,
    v_scales_ptr: tl.tensor,
    qk_ptr: tl.tensor,  # [tokens, NUM_HEADS + NUM_KV_HEADS, 2 * HALF], the heads of a token side by side
    v_ptr: tl.tensor,  # [tokens, NUM_KV_HEADS, 2 * HALF], as qk
    turn_ptr: tl.tensor,  # [tokens, 2, HALF]
    slots_ptr: tl.tensor,  # [tokens]
    qk_stride: tl.tensor,
    v_stride: tl.tensor,
    num_slots: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_BLOCK_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DEBUG: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_q_parts = (NUM_HEADS + BLOCK_Q - 1) // BLOCK_Q
    i = tl.arange(0, BLOCK_HALF)
    turn_ptrs = turn_ptr + token * (2 * HALF) + i
    cos, sin = _load_halves(turn_ptrs[None, :], (i < HALF)[None, :], HALF)
    if part < num_q_parts:
        q_heads = part * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_mask = (q_heads < NUM_HEADS)[:, None] & (i < HALF)[None, :]
        q_offsets = q_heads[:, None] * (2 * HALF) + i[None, :]
        q_first, q_second = _load_halves(qk_ptr + token * qk_stride + q_offsets, q_mask, HALF)
        q_ptrs = q_ptr + token * (NUM_HEADS * 2 * HALF) + q_offsets
        _store_halves(q_ptrs, q_first * cos - q_second * sin, q_second * cos + q_first * sin, q_mask, HALF)
    else:
        heads = (part - num_q_parts) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        mask = (heads < NUM_KV_HEADS)[:, None] & (i < HALF)[None, :]
        offsets = heads[:, None] * (2 * HALF) + i[None, :]
        slot = tl.load(slots_ptr + token)
        first, second = _load_halves(qk_ptr + token * qk_stride + NUM_HEADS * 2 * HALF + offsets, mask, HALF)
        v_first, v_second = _load_halves(v_ptr + token * v_stride + offsets, mask, HALF)
        k_first, k_second = first * cos - second * sin, second * cos + first * sin
        is_in_range = (slot >= 0) & (slot < num_slots)
        if DEBUG:
            if (slot < 0) | (slot >= num_slots):
                tl.device_print("rope_kv_write: out of range in slot_mapping:", slot)
            assert is_in_range, "rope_kv_write: a slot of slot_mapping is negative or not below num_slots"
        mask = mask & is_in_range
        head_mask = (heads < NUM_KV_HEADS) & is_in_range
        # fmt: off
        _write_slot(k_cache_ptr, k_scales_ptr, slot, k_first, k_second, heads, offsets, mask, head_mask,
                    NUM_KV_HEADS, HALF, KV_BLOCK_SIZE, BLOCK_STRIDE, SCALE_BLOCK_STRIDE, LARGEST)
        _write_slot(v_cache_ptr, v_scales_ptr, slot, v_first, v_second, heads, offsets, mask, head_mask,
                    NUM_KV_HEADS, HALF, KV_BLOCK_SIZE, BLOCK_STRIDE, SCALE_BLOCK_STRIDE, LARGEST)
        # fmt: on


def rope_kv_write_triton(
    qk: Tensor,
    v: Tensor,
    turn: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    is_debug: bool = IS_DEBUG,
) -> Tensor:
    """See `rope_kv_write`. turn: of `rotation_triton`; qk and v may be views of one tensor, each token's heads whole.

    A slot that is not in the cache is printed and stops the GPU's context where is_debug is set; else its token is not
    written, and nothing is said. Raises ValueError for shapes, strides and dtypes.
    """
    num_tokens, num_kv_heads, head_dim = v.shape
    num_heads, half = qk.shape[1] - num_kv_heads, head_dim // 2
    _check_arguments(qk, v, turn, k_cache, v_cache, slot_mapping)
    keys, values = paged_kv(k_cache, num_kv_heads, head_dim), paged_kv(v_cache, num_kv_heads, head_dim)
    q = qk.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return q
    num_blocks, block_size = keys.numbers.shape[:2]
    block_half = triton.next_power_of_2(half)
    heads_at_once = max(1, _TILE // block_half)
    block_q = min(heads_at_once, triton.next_power_of_2(num_heads))
    block_kv = min(heads_at_once, triton.next_power_of_2(num_kv_heads))
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(num_heads, block_q) + triton.cdiv(num_kv_heads, block_kv))](
        q,
        _storable(keys.numbers),
        _storable(values.numbers),
        keys.scales,
        values.scales,
        qk,
        v,
        turn,
        slot_mapping,
        qk.stride(0),
        v.stride(0),
        num_blocks * block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        KV_BLOCK_SIZE=block_size,
        BLOCK_STRIDE=keys.numbers.stride(0),
        SCALE_BLOCK_STRIDE=0 if keys.scales is None else keys.scales.stride(0),
        LARGEST=LARGEST.get(k_cache.dtype, 0.0),
        BLOCK_HALF=block_half,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        DEBUG=is_debug,
        num_warps=2,
        # so that a key is rounded as torch rounds it, and its quantised numbers are those of `quantised`
        enable_fp_fusion=False,
        debug=is_debug,
    )
    return q


def _storable(numbers: Tensor) -> Tensor:
    """float8 as bytes, as which the kernel computes it."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


def _check_arguments(
    qk: Tensor, v: Tensor, turn: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    num_tokens, num_kv_heads, head_dim = v.shape
    _check("qk", qk, (num_tokens, qk.shape[1], head_dim // 2 * 2), v.dtype, may_be_apart=True)
    _check("v", v, (num_tokens, num_kv_heads, head_dim), v.dtype, may_be_apart=True)
    _check("turn", turn, (num_tokens, 2, head_dim // 2), torch.float32)
    _check("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache must be {k_cache.dtype} {list(k_cache.shape)} as k_cache is")
    if k_cache.dtype != v.dtype and not is_quantised(k_cache.dtype):
        raise ValueError(f"k_cache must be {v.dtype}, as qk and v are, or quantised, not {k_cache.dtype}")


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, may_be_apart: bool = False) -> None:
    """may_be_apart: only what belongs to one token need be contiguous."""
    if x.shape != shape or x.dtype != dtype or not (x[:1] if may_be_apart else x).is_contiguous():
        which = "with each token contiguous" if may_be_apart else "contiguous"
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, {which}, not {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def rotation(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Rotation:
    """positions [tokens] int64, inv_freq [head_dim / 2] float32. Angles are float32 whatever `dtype` is."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype))


def rope_kv_write(
    qk: Tensor, v: Tensor, turn: Rotation, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Turns queries and keys, writes keys and values to their slots, returns the queries [tokens, num_heads, head_dim].

    qk [tokens, num_heads + num_kv_heads, head_dim], queries first; v [tokens, num_kv_heads, head_dim].
    k_cache, v_cache as in `kv_format`: of qk's dtype, or quantised.
    slot_mapping [tokens] int64: block * block_size + offset. Several tokens may share a slot that is never read.
    """
    num_kv_heads, head_dim = v.shape[1:]
    turned = torch.addcmul(qk * turn.cos, qk.roll(head_dim // 2, dims=-1), turn.signed_sin)
    q, k = turned.split((turned.shape[1] - num_kv_heads, num_kv_heads), dim=1)
    write_tokens(k, k_cache, slot_mapping)
    write_tokens(v, v_cache, slot_mapping)
    return q
