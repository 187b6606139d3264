"""The states that the splits of a decode leave behind, and their merge into the row's result.

A row of several splits has its states side by side in a workspace, in the order of its keys. They are merged one by
one, as a deterministic prefill merges its own on the way (`attention_tiles.merge`), so that both round alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noria.kernels.attention_tiles import merge, normalise, padded_dim
from noria.kernels.language import tl, triton

# states that are read ahead of being merged
_AT_ONCE = 8


class Workspace(NamedTuple):
    """States of splits that are yet to be merged: acc [units, num_heads, DIM], stats [units, num_heads, 2], float32."""

    acc: Tensor
    stats: Tensor


def empty_workspace(num_units: int, num_heads: int, head_dim: int, device: torch.device) -> Workspace:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return Workspace(empty(num_units, num_heads, padded_dim(head_dim)), empty(num_units, num_heads, 2))


@triton.jit
def _merge_kernel(
    out_ptr,
    acc_ptr,
    stats_ptr,
    query_indices_ptr,
    unit_starts_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    first_unit, end_unit = tl.load(unit_starts_ptr + row), tl.load(unit_starts_ptr + row + 1)
    # the other kernel has written it
    if end_unit - first_unit == 1:
        return
    dims = tl.arange(0, DIM)
    acc = tl.zeros([DIM], dtype=tl.float32)
    row_max = tl.full([], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([], dtype=tl.float32)
    for first in tl.range(first_unit, end_unit, AT_ONCE):
        for offset in tl.static_range(AT_ONCE):
            unit = first + offset
            is_split = unit < end_unit
            state = tl.cast(unit, tl.int64) * NUM_HEADS + head
            other_acc = tl.load(acc_ptr + state * DIM + dims, mask=is_split & (dims < DIM), other=0.0)
            other_max = tl.load(stats_ptr + state * 2, mask=is_split, other=float("-inf"))
            other_sum = tl.load(stats_ptr + state * 2 + 1, mask=is_split, other=0.0)
            acc, row_max, row_sum = merge(acc, row_max, row_sum, other_acc, other_max, other_sum)
    token = tl.load(query_indices_ptr + row).to(tl.int64)
    out = normalise(acc, row_sum).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


def merge_splits(out: Tensor, workspace: Workspace, query_indices: Tensor, unit_starts: Tensor) -> None:
    """Writes the tokens of `out` [tokens, num_heads, head_dim] whose rows have no split, or more than one.

    query_indices [rows], unit_starts [rows + 1]: see DecodeRows.
    """
    num_heads, head_dim = out.shape[1:]
    _merge_kernel[(len(query_indices), num_heads)](
        out,
        workspace.acc,
        workspace.stats,
        query_indices,
        unit_starts,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM=padded_dim(head_dim),
        AT_ONCE=_AT_ONCE,
        num_warps=1,
    )
