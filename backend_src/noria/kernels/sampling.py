"""Sampling on a GPU: from logits to tokens with no sort of the vocabulary and no word from the host.

The definition is that of `sample` in runtime/sampling.py; for row r, y its scores, T its temperature:

    w_i = floor(2^40 exp((y_i - max y) / T)) where the filters keep i, else 0
    token = the first i, in order of ids, with w_0 + ... + w_i > u (w_0 + ... + w_{V-1})

u is the SplitMix64 hash of seed and position. Temperature 0 takes the largest y, the lowest id of equals. A row with
NaN or +inf, or of nothing but -inf, gets -1. All sums are of integers, so that a row's token depends on that row alone.

    group_maxima  [R, G] the largest score of each group of ids; many programs a row
    sums          [R, G] the weight of each group, for rows without top_k; many programs a row
    draw          one program a row: lists the groups that can hold a token inside top_k and top_p, finds thresholds
                  among those by a search with a few pivots a pass, then the group that u falls into, then the token

Only rows that need a step pay for it: a greedy row looks at maxima and at one group, a row without top_k and top_p at
sums and at one group. One program reads some 40 to 60 GB/s, so that a pass over the 512 KB of 128k scores takes it
10 us: the two full passes have many, and nothing else passes over all scores, unless they are so flat that top_p keeps
most.

exp is Triton's: on NVIDIA GPUs ex2.approx(x log2 e), some ulp from torch's, for the same x the same in every kernel.
So a device repeats a token bit for bit; two of different kinds may differ where u is within 1e-6 of a boundary.

logits [R, V] float32, V at most 2^22
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noria.kernels.language import tl, triton
from noria.kernels.sampling_filters import (
    edge_of_top_p,
    kept_weight,
    list_groups,
    locate,
    search,
    total_of,
    weight_of,
)
from noria.kernels.sampling_groups import (
    BLOCK,
    GROUP_SIZE,
    GROUPS_PER_PROGRAM,
    GROUPS_PER_TILE,
    IMAGE_OF_INFINITY,
    IMAGE_OF_MINUS_INFINITY,
    bound_of,
    check_logits,
    group_maxima,
    image_of,
    load_groups,
    load_listed,
    peak_of,
    score_of,
)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is drawn; device tensors, contiguous.

    seeds: [R] int64, the bits of an unsigned number. positions: [R] int64.
    temperatures: [R] float32; 0 is greedy. top_ks: [R] int32; 0 keeps all. top_ps: [R] float64; 1 keeps all.
    min_weights: [R] int64, floor(min_p 2^40).
    needs_sums: whether a row is neither greedy nor has top_k.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_weights: Tensor
    needs_sums: bool


_DTYPES = {
    "seeds": torch.int64,
    "positions": torch.int64,
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float64,
    "min_weights": torch.int64,
}


@triton.jit
def _target_of(seed, position, total):
    """floor(u total), below total, with u in [0, 1) of output number position + 1 of a stream of SplitMix64.

    The first output for the seed (Steele, Lea, Flood, OOPSLA 2014) is where that stream starts.
    """
    state = _splitmix64(seed.to(tl.uint64, bitcast=True), tl.full((), 1, tl.uint64))
    bits = _splitmix64(state, position.to(tl.uint64) + 1) >> 11
    uniform = bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
    return tl.minimum((total.to(tl.float64) * uniform).to(tl.int64), total - 1)


@triton.jit
def _splitmix64(state, step):
    z = state + step * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _sums_kernel(
    logits,  # [R, V] float32
    maxima,  # [R, G] int32
    sums,  # [R, G] int64
    temperatures, top_ks, top_ps, min_weights,  # [R]
    vocab_size, num_groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS groups, R): each group's weight; before min_p if there is top_p, which comes first."""
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (tl.load(top_ks + row) == 0):
        peak_image, _first_group = peak_of(maxima + row * num_groups, num_groups, BLOCK)
        if (peak_image > IMAGE_OF_MINUS_INFINITY) & (peak_image < IMAGE_OF_INFINITY):
            groups = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            is_group = groups < num_groups
            x, _ids = load_groups(logits + row * vocab_size, groups, is_group, vocab_size, GROUP)
            weight = weight_of(x, score_of(peak_image), temperature).to(tl.int64)
            least = tl.where(tl.load(top_ps + row) < 1, 0, tl.load(min_weights + row))
            sums_of_groups = tl.sum(tl.where(weight >= least, weight, 0), 1)
            tl.store(sums + row * num_groups + groups, sums_of_groups, mask=is_group)


@triton.jit
def _draw(
    logits, maxima, sums, groups, peak_image, temperature, seed, position, top_k, top_p, least, vocab_size, num_groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token of one row that is finite and not greedy."""
    peak = score_of(peak_image)
    kth = tl.full((), IMAGE_OF_MINUS_INFINITY, tl.int32)
    edge = tl.full((), -1.0, tl.float32)
    last_id = tl.full((), vocab_size, tl.int32)
    count = tl.full((), num_groups, tl.int32)
    has_list = (top_k > 0) | (top_p < 1)
    if has_list:
        if top_k > 0:
            bound = bound_of(maxima, num_groups, peak_image, top_k, BLOCK)
            count = list_groups(maxima, groups, num_groups, bound, None, peak, temperature, BLOCK)
            low = bound.to(tl.int64) - 1
            limit = top_k.to(tl.float64)
            image, _above, _reach = search(
                logits, groups, count, vocab_size, low, peak_image.to(tl.int64), top_k.to(tl.int64), limit,
                peak, temperature, kth, False, ROWS, GROUP,
            )  # fmt: skip
            kth = image.to(tl.int32)
            total = tl.full((), 0, tl.int64)
            for start in range(0, count, ROWS):
                x, ids = load_listed(logits, groups, start, count, vocab_size, ROWS, GROUP)
                total += tl.sum(tl.sum(kept_weight(x, ids, peak, temperature, kth, 0, edge, last_id), 1))
        else:
            total = total_of(sums, num_groups, BLOCK)
        lightest = tl.ceil(total.to(tl.float64) * (1 - top_p) / vocab_size).to(tl.int64)
        least = tl.minimum(tl.maximum(least, lightest), total)
        if top_k == 0:
            count = list_groups(maxima, groups, num_groups, kth, least, peak, temperature, BLOCK)
        if top_p < 1:
            edge, last_id = edge_of_top_p(
                logits, groups, sums, count, vocab_size, total.to(tl.float64) * top_p, total, peak, temperature, kth,
                ROWS, GROUP, BLOCK,
            )  # fmt: skip
        for start in range(0, count, ROWS):
            x, ids = load_listed(logits, groups, start, count, vocab_size, ROWS, GROUP)
            weight = kept_weight(x, ids, peak, temperature, kth, least, edge, last_id)
            index = start + tl.arange(0, ROWS)
            tl.store(sums + index, tl.sum(weight, 1), mask=index < count)
        tl.debug_barrier()
    target = _target_of(seed, position, total_of(sums, count, BLOCK))
    found, rest = locate(sums, count, target, BLOCK)
    one = found + tl.arange(0, 1)
    group = tl.where(has_list, tl.load(groups + one, mask=has_list, other=0), one)
    x, ids = load_groups(logits, group, group >= 0, vocab_size, GROUP)
    weight = kept_weight(x, ids, peak, temperature, kth, least, edge, last_id)
    return tl.min(ids) + tl.sum((tl.cumsum(weight, 1) <= rest).to(tl.int32))


@triton.jit
def _draw_kernel(
    logits,  # [R, V] float32
    maxima, sums, groups,  # [R, G] int32, int64, int32
    seeds, positions, temperatures, top_ks, top_ps, min_weights,  # [R]
    token_ids,  # [R] int64
    vocab_size, num_groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    maxima += row * num_groups
    peak_image, first_group = peak_of(maxima, num_groups, BLOCK)
    token_id = tl.full((), -1, tl.int32)
    if (peak_image > IMAGE_OF_MINUS_INFINITY) & (peak_image < IMAGE_OF_INFINITY):
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            token_id = _draw(
                logits, maxima, sums + row * num_groups, groups + row * num_groups, peak_image, temperature,
                tl.load(seeds + row), tl.load(positions + row), tl.load(top_ks + row), tl.load(top_ps + row),
                tl.load(min_weights + row), vocab_size, num_groups, ROWS, GROUP, BLOCK,
            )  # fmt: skip
        else:
            group = first_group + tl.arange(0, 1)
            x, ids = load_groups(logits, group, group >= 0, vocab_size, GROUP)
            token_id = tl.min(tl.where(image_of(x) == peak_image, ids, vocab_size))
    tl.store(token_ids + row, token_id.to(tl.int64))


def sample_triton(
    logits: Tensor,
    rows: SamplingRows,
    out: Tensor | None = None,
    block: int = BLOCK,
    groups_per_tile: int = GROUPS_PER_TILE,
) -> Tensor:
    """[R] int64, into `out` if given: a token a row, -1 where none can be drawn. Launches only.

    logits: [R, V], with penalties and bans applied.
    block, groups_per_tile: how many maxima, and how many groups, are looked at at once; they affect the time alone.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    fields = {name: getattr(rows, name) for name in _DTYPES}
    for name, values in (*fields.items(), ("out", token_ids)):
        dtype = _DTYPES.get(name, torch.int64)
        if values.shape != (num_rows,) or values.dtype != dtype or not values.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{num_rows}] {dtype}, not {list(values.shape)} {values.dtype}")
    maxima = group_maxima(logits)
    num_groups = maxima.shape[1]
    sums = torch.empty(maxima.shape, dtype=torch.int64, device=logits.device)
    if rows.needs_sums:
        _sums_kernel[(triton.cdiv(num_groups, GROUPS_PER_PROGRAM), num_rows)](
            logits, maxima, sums, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_weights, vocab_size, num_groups,
            ROWS=GROUPS_PER_PROGRAM, GROUP=GROUP_SIZE, BLOCK=block,
        )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, maxima, sums, torch.empty_like(maxima), *fields.values(), token_ids, vocab_size, num_groups,
        ROWS=groups_per_tile, GROUP=GROUP_SIZE, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return token_ids
