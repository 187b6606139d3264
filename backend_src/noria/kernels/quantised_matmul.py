"""Matrix product with weights of one byte: y = (x N^T) * s + b, for the weights N * s.

    x [rows, in_features], rows may lie apart; N [out_features, in_features] int8 or float8_e4m3fn; s [out_features]
    float32; b [out_features], of x's dtype; y [rows, out_features], of x's dtype

N is turned into x's dtype, exactly, in registers, so that only its bytes are read from memory. Sums are in float32, and
y is rounded once. Invariant, it has the one tile of `matmul`. Otherwise there are tiles by the number of rows, and for
few rows N is to be read at the memory's pace, for which a GPU needs some 130 programs:
- up to 16 rows: narrow tiles, whose warps have a part of the inputs each; a program adds them up at its end
- up to 64 rows, which narrow tiles would read too often: programs have a part of the inputs each, in a fixed number for
  a shape, and a second kernel adds them up in order

float8_e4m3fn takes a GPU of capability 8.9; float32 x is for exactness and has no fast path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.kernels.language import tl, triton
from noria.kernels.matmul import (
    ENOUGH_PROGRAMS,
    Tile,
    check_x_and_bias,
    invariant_tile,
    launch_matmul,
    matmul,
    scale_and_add_bias,
)

NUMBER_DTYPES = (torch.int8, torch.float8_e4m3fn)

_MAX_FEW_ROWS = 16
_MAX_SPLIT_ROWS = 64
_MAX_SPLITS = 8
_MIN_INPUTS_OF_SPLIT = 256
_SUM_BLOCK_N = 1024


def few_rows_tile(num_rows: int, out_features: int) -> Tile:
    """block_k: of all warps together."""
    block_m = 8 if num_rows <= 8 else 16
    if out_features >= 64 * ENOUGH_PROGRAMS:
        return Tile(block_m, 64, 256, 4, 4)
    return Tile(block_m, 32 if out_features >= 32 * ENOUGH_PROGRAMS else 16, 512, 8, 4)


def many_rows_tile(num_rows: int) -> Tile:
    return Tile(64, 128, 64, 4, 4) if num_rows <= _MAX_SPLIT_ROWS else Tile(128, 128, 64, 8, 4)


def num_splits(num_rows: int, in_features: int, out_features: int) -> int:
    """Parts that the inputs are cut into for `many_rows_tile`."""
    if num_rows > _MAX_SPLIT_ROWS:
        return 1
    programs = triton.cdiv(out_features, many_rows_tile(num_rows).block_n)
    wanted = triton.next_power_of_2(triton.cdiv(ENOUGH_PROGRAMS, programs))
    return max(1, min(wanted, _MAX_SPLITS, in_features // _MIN_INPUTS_OF_SPLIT))


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr: tl.tensor,  # [rows, in_features]
    numbers_ptr: tl.tensor,  # [out_features, in_features]
    scales_ptr: tl.tensor,  # [out_features]
    bias_ptr: tl.tensor,  # [out_features]
    y_ptr: tl.tensor,  # [rows, out_features]
    num_rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    x_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARP_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # in_features is no multiple of WARP_K * NUM_WARPS
    HAS_BIAS: tl.constexpr,
) -> None:
    # [warps, outputs, inputs] x [warps, inputs, rows]: Triton gives each product of a batch to one warp. Numbers stand
    # to the left, as the instruction takes 16 rows from there and 8 columns from the right
    BLOCK_K: tl.constexpr = WARP_K * NUM_WARPS
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, NUM_WARPS)[:, None] * WARP_K + tl.arange(0, WARP_K)[None, :]
    is_row = (m < num_rows)[None, None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[None, None, :] * x_stride + k[:, :, None]
    # outputs past the end are computed, of the last numbers, and not stored
    n_in_range = tl.minimum(n, out_features - 1).to(tl.int64)[None, :, None]
    numbers_ptrs = numbers_ptr + n_in_range * in_features + k[:, None, :]
    parts = tl.zeros((NUM_WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=NUM_STAGES):
        if HAS_TAIL:
            is_input = start + k < in_features
            x = tl.load(x_ptrs, mask=is_row & is_input[:, :, None], other=0.0)
            numbers = tl.load(numbers_ptrs, mask=is_input[:, None, :], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
            numbers = tl.load(numbers_ptrs)
        parts = tl.dot(numbers.to(x.dtype), x, parts)
        x_ptrs += BLOCK_K
        numbers_ptrs += BLOCK_K
    y = scale_and_add_bias(tl.sum(parts, axis=0).T, n, scales_ptr, bias_ptr, out_features, True, HAS_BIAS)
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < out_features)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def sum_splits_kernel(
    parts_ptr: tl.tensor,  # [splits, rows, out_features]
    scales_ptr: tl.tensor,  # [out_features]
    bias_ptr: tl.tensor,  # [out_features]
    y_ptr: tl.tensor,  # [rows, out_features]
    num_rows: tl.tensor,
    out_features: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < out_features
    y = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        y += tl.load(parts_ptr + (split * num_rows + row) * out_features + n, mask=is_output, other=0.0)
    y = scale_and_add_bias(y[None, :], n, scales_ptr, bias_ptr, out_features, True, HAS_BIAS)
    tl.store(y_ptr + row * out_features + n[None, :], y.to(y_ptr.dtype.element_ty), mask=is_output[None, :])


def quantised_matmul_triton(
    x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None, *, is_invariant: bool = False
) -> Tensor:
    """is_invariant: a row's result depends, to the bit, on nothing beside it."""
    check_x_and_bias(x, numbers, bias)
    if numbers.dtype not in NUMBER_DTYPES:
        raise ValueError(f"numbers must be int8 or float8_e4m3fn, not {numbers.dtype}")
    num_rows, out_features = len(x), len(numbers)
    if scales.dtype != torch.float32 or scales.shape != (out_features,) or not scales.is_contiguous():
        raise ValueError(f"scales must be contiguous [{out_features}] float32, not {list(scales.shape)} {scales.dtype}")
    y = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if is_invariant or x.dtype == torch.float32:
        launch_matmul(x, numbers, scales, bias, y[None], invariant_tile(x.dtype, out_features))
    elif num_rows <= _MAX_FEW_ROWS:
        _launch_few_rows(x, numbers, scales, bias, y)
    else:
        _launch_many_rows(x, numbers, scales, bias, y)
    return y


def _launch_few_rows(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    num_rows, in_features = x.shape
    if num_rows == 0:
        return
    tile = few_rows_tile(num_rows, len(numbers))
    few_rows_kernel[(triton.cdiv(len(numbers), tile.block_n),)](
        x,
        numbers,
        scales,
        bias,
        y,
        num_rows,
        in_features,
        len(numbers),
        x.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WARP_K=tile.block_k // tile.num_warps,
        NUM_WARPS=tile.num_warps,
        NUM_STAGES=tile.num_stages,
        HAS_TAIL=in_features % tile.block_k != 0,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
    )


def _launch_many_rows(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    num_rows, out_features = y.shape
    tile = many_rows_tile(num_rows)
    splits = num_splits(num_rows, x.shape[1], out_features)
    if splits == 1:
        launch_matmul(x, numbers, scales, bias, y[None], tile)
        return
    parts = torch.empty((splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    launch_matmul(x, numbers, None, None, parts, tile)
    sum_splits_kernel[(num_rows, triton.cdiv(out_features, _SUM_BLOCK_N))](
        parts,
        scales,
        bias,
        y,
        num_rows,
        out_features,
        NUM_SPLITS=splits,
        BLOCK_N=_SUM_BLOCK_N,
        HAS_BIAS=bias is not None,
    )


def quantised_matmul(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference: the product with the weights that the numbers stand for, as `matmul` computes it."""
    return matmul(x, numbers.to(torch.promote_types(x.dtype, torch.float32)) * scales[:, None], bias)
