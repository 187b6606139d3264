"""Matrix product of a linear layer, invariant: y = x W^T + b

    x [rows, in_features], rows may lie apart; W [out_features, in_features]; b [out_features]; y [rows, out_features]

All of one dtype. Sums are in float32, float32's products in full precision, and y is rounded once. There is one tile
for a dtype and a number of outputs, and one order in which inputs are added, whatever the rows: a row's result depends,
to the bit, on nothing beside it. cuBLAS, which is faster, chooses by the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noria.kernels.language import tl, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# what gives nearly each of the 132 multiprocessors of an H100 or H200 one
ENOUGH_PROGRAMS = 128


class Tile(NamedTuple):
    """Rows, outputs and inputs that a program has in hand at a time; num_stages: of its loop over inputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def invariant_tile(dtype: torch.dtype, out_features: int) -> Tile:
    """dtype: of x. 64 rows fill the smallest wgmma, of 4 warps."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 4, 3)
    if out_features >= 128 * ENOUGH_PROGRAMS:
        return Tile(64, 128, 64, 4, 4)
    return Tile(64, 64, 64, 4, 6)


@triton.jit
def scale_and_add_bias(
    y: tl.tensor,
    n: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_features: tl.tensor,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """y [rows, outputs] float32, of the outputs n."""
    if HAS_SCALES:
        y *= tl.load(scales_ptr + n, mask=n < out_features, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    return y


# num_rows: what Triton would compile otherwise for 1 row, or a multiple of 16, might add in another order
@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    x_ptr: tl.tensor,  # [rows, in_features]
    weight_ptr: tl.tensor,  # [out_features, in_features]
    scales_ptr: tl.tensor,  # [out_features]
    bias_ptr: tl.tensor,  # [out_features]
    y_ptr: tl.tensor,  # [splits, rows, out_features]
    num_rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    split_size: tl.tensor,  # inputs of a split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # in_features is no multiple of BLOCK_K
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    # programs that run together have the same weights, which are read once, and different rows
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * split_size
    k = first + tl.arange(0, BLOCK_K)
    is_row = (m < num_rows)[:, None]
    rows = m.to(tl.int64)[:, None]
    x_ptrs = x_ptr + rows * x_stride + k[None, :]
    # outputs past the end are computed, of the last weights, and not stored
    weight_ptrs = weight_ptr + tl.minimum(n, out_features - 1).to(tl.int64)[:, None] * in_features + k[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, tl.minimum(first + split_size, in_features), BLOCK_K, num_stages=NUM_STAGES):
        if HAS_TAIL:
            is_input = (start + tl.arange(0, BLOCK_K) < in_features)[None, :]
            x = tl.load(x_ptrs, mask=is_row & is_input, other=0.0)
            weight = tl.load(weight_ptrs, mask=is_input, other=0.0)
        else:
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
            weight = tl.load(weight_ptrs)
        y = tl.dot(x, weight.to(x.dtype).T, y, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    y = scale_and_add_bias(y, n, scales_ptr, bias_ptr, out_features, HAS_SCALES, HAS_BIAS)
    y_ptrs = y_ptr + (split.to(tl.int64) * num_rows + rows) * out_features + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=is_row & (n < out_features)[None, :])


def matmul_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_x_and_bias(x, weight, bias)
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be of x's dtype, {x.dtype}, not {weight.dtype}")
    y = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    launch_matmul(x, weight, None, bias, y[None], invariant_tile(x.dtype, len(weight)))
    return y


def launch_matmul(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor, tile: Tile) -> None:
    """y [splits, rows, out_features]: of so many equal parts of the inputs, to whole tiles."""
    num_splits, num_rows, out_features = y.shape
    in_features = x.shape[1]
    if num_rows == 0:
        return
    grid = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(out_features, tile.block_n), num_splits)
    matmul_kernel[grid](
        x,
        weight,
        scales,
        bias,
        y,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        triton.cdiv(triton.cdiv(in_features, tile.block_k), num_splits) * tile.block_k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        NUM_STAGES=tile.num_stages,
        HAS_TAIL=in_features % tile.block_k != 0,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
    )


def check_x_and_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError for shapes and strides that do not fit, or x in another dtype than there are kernels for."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [out_features, in_features], not {list(weight.shape)}")
    out_features, in_features = weight.shape
    if x.dim() != 2 or x.shape[1] != in_features or (in_features > 1 and x.stride(1) != 1):
        raise ValueError(f"x must be [rows, {in_features}], the inputs of a row side by side, not {list(x.shape)}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous [{out_features}] {x.dtype}, not {list(bias.shape)} {bias.dtype}")


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference: in float32, or float64 where x is that, and rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)
