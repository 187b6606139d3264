"""RMS norm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight, alone or after x += delta.

The mean is over the last dimension, in float32.

x [..., features], weight [features] or any shape that broadcasts against x, y like x
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from noria.kernels.language import tl, triton

# numbers of x that one program takes, where a head is smaller than that
_TILE = 1024


@triton.jit
def _rms_norm_kernel(
    y_ptr: tl.tensor,  # [tokens, HEADS, FEATURES] contiguous
    x_ptr: tl.tensor,  # [tokens, HEADS, FEATURES]
    delta_ptr: tl.tensor,  # like x, or None
    weight_ptr: tl.tensor,  # [HEADS, FEATURES], contiguous, or [FEATURES] where weight_head_stride is 0
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    delta_token_stride: tl.tensor,
    weight_head_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    features = tl.arange(0, BLOCK_FEATURES)[None, :]
    mask = (heads < HEADS) & (features < FEATURES)

    x_ptrs = x_ptr + token * x_token_stride + heads * x_head_stride + features
    x = tl.load(x_ptrs, mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + token * delta_token_stride + heads * FEATURES + features, mask, other=0.0)
    # asked for before the sum is waited for
    weight = tl.load(weight_ptr + heads * weight_head_stride + features, mask, other=0.0)
    if delta_ptr is not None:
        total = (x + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptrs, total, mask)
        # the norm is of what the residual stream holds
        x = total.to(tl.float32)
    mean = tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / FEATURES)
    y = x * tl.rsqrt(mean + eps) * weight.to(tl.float32)
    tl.store(y_ptr + (token * HEADS + heads) * FEATURES + features, y.to(y_ptr.dtype.element_ty), mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y, contiguous. x [rows, features] or [tokens, heads, features], a view if need be, with whole rows of features.

    weight [features], or [heads, features] beside three dimensions. Raises ValueError for any other shape.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`. x, delta [rows, features], no two rows of x overlapping; shares no memory with delta."""
    if delta.shape != x.shape or delta.dtype != x.dtype or delta.stride(-1) != 1 or x.dim() != 2:
        raise ValueError(
            f"delta must be {x.dtype} [rows, features] as x {list(x.shape)} is, its features side by side, "
            f"not {delta.dtype} {list(delta.shape)} with strides {delta.stride()}"
        )
    if x.stride(0) < x.shape[1]:
        raise ValueError(f"x is written to: its rows must not overlap, as they do with strides {x.stride()}")
    return _launch(x, delta, weight, eps)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(
            "x must be [rows, features] or [tokens, heads, features], its features side by side, "
            f"not {list(x.shape)} with strides {x.stride()}"
        )
    if weight.shape not in (x.shape[-1:], x.shape[1:]) or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous {list(x.shape[-1:])}, or {list(x.shape[1:])} beside heads, "
            f"not {list(weight.shape)} with strides {weight.stride()}"
        )
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    num_heads, num_features = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    # a function of the shape of one token alone, so that the sums are the same beside any other tokens
    block_features = triton.next_power_of_2(num_features)
    block_heads = min(max(1, _TILE // block_features), triton.next_power_of_2(num_heads))
    _rms_norm_kernel[(len(x), triton.cdiv(num_heads, block_heads))](
        y,
        x,
        delta,
        weight,
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        0 if delta is None else delta.stride(0),
        0 if weight.dim() == 1 else num_features,
        eps,
        HEADS=num_heads,
        FEATURES=num_features,
        BLOCK_HEADS=block_heads,
        BLOCK_FEATURES=block_features,
        num_warps=min(max(block_heads * block_features // 256, 1), 16),
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x + delta. x, the residual stream, is that sum afterwards, rounded to its dtype."""
    x += delta
    return rms_norm(x, weight, eps)
