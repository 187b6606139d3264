"""How keys and values lie in a block of the cache, and the views of it that kernels read and write.

Plain (float32, float16, bfloat16): [blocks, block_size, num_kv_heads, head_dim].
Quantised (int8, float8_e4m3fn): [blocks, bytes of a block], in each block
    numbers  block_size x num_kv_heads x head_dim, one byte each
    scales   block_size x num_kv_heads float32;  a key or value is number * scale

A token's head has one scale, largest magnitude / LARGEST[dtype], so that writing a token changes no other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noria.kernels.language import tl, triton

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# a head whose magnitudes all lie below it is taken for zeros: its scale, or the inverse, might be no normal float32
SMALLEST = 1e-30

_SMALLEST = tl.constexpr(SMALLEST)
_INF_BITS = tl.constexpr(0x7F800000)
# added to a float32 below 2^22 it leaves the nearest whole number, ties to even, in the lowest bits
_ROUNDER = tl.constexpr(1.5 * 2**23)


class PagedKV(NamedTuple):
    """numbers [blocks, block_size, num_kv_heads, head_dim]; scales [blocks, block_size, num_kv_heads] float32, or none.

    Views of one cache of keys or of values. Of these only a plain cache's numbers are contiguous; a head always is.
    """

    numbers: Tensor
    scales: Tensor | None


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in LARGEST


def paged_kv(cache: Tensor, num_kv_heads: int, head_dim: int) -> PagedKV:
    """The views of a cache in either layout. Raises ValueError where it is neither."""
    if not is_quantised(cache.dtype):
        if cache.dim() != 4 or cache.shape[2:] != (num_kv_heads, head_dim) or not cache.is_contiguous():
            raise ValueError(
                f"a cache in {cache.dtype} must be contiguous [blocks, block_size, {num_kv_heads}, {head_dim}], "
                f"not {list(cache.shape)}"
            )
        return PagedKV(cache, None)
    token_bytes = num_kv_heads * (head_dim + SCALE_BYTES)
    if cache.dim() != 2 or cache.shape[1] % token_bytes or not cache.is_contiguous():
        raise ValueError(
            f"a cache in {cache.dtype} must be contiguous [blocks, a multiple of {token_bytes} bytes], "
            f"not {list(cache.shape)}"
        )
    num_blocks, block_bytes = cache.shape
    block_size = block_bytes // token_bytes
    shape = (num_blocks, block_size, num_kv_heads)
    num_numbers = block_size * num_kv_heads * head_dim
    if num_numbers % SCALE_BYTES:
        raise ValueError(f"block_size * num_kv_heads * head_dim must be a multiple of {SCALE_BYTES}, not {num_numbers}")
    numbers = cache[:, :num_numbers].view(*shape, head_dim)
    scales = cache.view(torch.float32)[:, num_numbers // SCALE_BYTES :].view(shape)
    return PagedKV(numbers, scales)


def dequantised(kv: PagedKV, dtype: torch.dtype) -> Tensor:
    """[blocks, block_size, num_kv_heads, head_dim]: what the cache stands for."""
    numbers = kv.numbers.to(dtype)
    return numbers if kv.scales is None else numbers * kv.scales.to(dtype)[..., None]


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers, like x [..., head_dim], and scales [...]: of each head what a cache of `dtype` keeps, to nearest even.

    A head that is smaller than SMALLEST throughout becomes zeros with scale 0. One that holds NaN or inf gets the scale
    NaN, so that it shows.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_finite = largest.isfinite()
    is_zero = largest < SMALLEST
    scale = (largest / LARGEST[dtype]).masked_fill(is_zero, 0.0).masked_fill(~is_finite, torch.nan)
    # not LARGEST / largest, which torch rounds twice
    inverse = torch.full_like(largest, LARGEST[dtype]).div(largest).masked_fill(is_zero, 0.0)
    numbers = (x * inverse).masked_fill(~is_finite, 0.0)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale.squeeze(-1)


def write_tokens(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """x [tokens, num_kv_heads, head_dim] to its slots, [tokens] int64: block * block_size + offset."""
    if not is_quantised(cache.dtype):
        cache.view(-1, *x.shape[1:]).index_copy_(0, slot_mapping, x)
        return
    kv = paged_kv(cache, *x.shape[1:])
    assert kv.scales is not None, "a quantised cache has scales"
    block_size = kv.numbers.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    numbers, scales = quantised(x, cache.dtype)
    # as bytes, which can be written by index whatever they stand for
    kv.numbers.view(torch.uint8)[block, offset] = numbers.view(torch.uint8)
    kv.scales[block, offset] = scales


@triton.jit
def scale_heads(first: tl.tensor, second: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """`quantised` in a kernel, before the rounding: both halves over their scale, and the scales.

    first, second [heads, half a head] float32; scales [heads]
    """
    # as whole numbers magnitudes are ordered as they are as floats, and NaN is the largest
    first_bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second_bits = second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_bits = tl.max(tl.maximum(first_bits, second_bits), axis=1)
    is_finite = largest_bits < _INF_BITS
    largest = largest_bits.to(tl.float32, bitcast=True)
    is_scaled = is_finite & (largest >= _SMALLEST)
    largest = tl.where(is_scaled, largest, 1.0)
    limit = tl.full(largest.shape, LARGEST, tl.float32)
    scales = tl.where(is_scaled, tl.div_rn(largest, limit), 0.0)
    inverse = tl.where(is_scaled, tl.div_rn(limit, largest), 0.0)[:, None]
    # NaN times 0 would be NaN, which is no whole number
    first = tl.where(is_finite[:, None], first * inverse, 0.0)
    second = tl.where(is_finite[:, None], second * inverse, 0.0)
    return first, second, tl.where(is_finite, scales, float("nan"))


@triton.jit
def as_number(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x float32 as a cache of `dtype` stores it, to nearest even; uint8 stands for float8_e4m3fn's bits."""
    if dtype == tl.int8:
        return (x + _ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    elif dtype == tl.uint8:
        return _e4m3_bits(x)
    else:
        return x.to(dtype)


@triton.jit
def _e4m3_bits(x: tl.tensor) -> tl.tensor:
    """uint8 of float8_e4m3fn, to nearest even. |x| <= 448 float32, to rounding.

    In whole numbers, which the interpreter computes as a GPU does; it rounds wrongly to 8 bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # from 2^-6 up: 20 bits of the fraction go, and the exponent's bias falls from 127 to 7
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below: multiples of 2^-9, the eighth of which is the code of 2^-6
    subnormal = (tl.abs(x) * 512.0 + _ROUNDER).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
