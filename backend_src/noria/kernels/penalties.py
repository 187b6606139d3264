"""Penalties and bans on a GPU: scores from logits, where they differ, and back.

For an entry (row r, token i), with p its repetition penalty and s what is subtracted, both float32:

    y_ri = x_ri p - s if x_ri < 0, else x_ri / p - s

p is 1 for tokens that it does not concern; s is presence + frequency x occurrences, +inf for a banned token. A logit
that is NaN or +inf stays, so that its row fails, ban or no ban. Few logits have an entry: they are changed in place,
and put back when the tokens are drawn, which costs less than a copy of all.

logits [R, V] float32; indices [E] int64, r V + i, each once; repetition, subtrahends [E] float32
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.kernels.language import tl, triton
from noria.kernels.sampling_groups import check_logits

BLOCK = 1024


@triton.jit(do_not_specialize=["num_entries"])
def _penalise_kernel(
    logits,  # [R V] float32
    indices,  # [E] int64
    repetition, subtrahends, saved,  # [E] float32
    num_entries,
    BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    index = tl.load(indices + entry, mask=is_entry, other=0)
    x = tl.load(logits + index, mask=is_entry, other=0.0)
    tl.store(saved + entry, x, mask=is_entry)
    penalty = tl.load(repetition + entry, mask=is_entry, other=1.0)
    subtrahend = tl.load(subtrahends + entry, mask=is_entry, other=0.0)
    y = tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)) - subtrahend
    tl.store(logits + index, tl.where(x < float("inf"), y, x), mask=is_entry)


def penalise_triton(logits: Tensor, indices: Tensor, repetition: Tensor, subtrahends: Tensor) -> Tensor:
    """Changes logits in place. Returns [E] float32: what they were, for `restore`."""
    check_logits(logits)
    for name, values, dtype in (
        ("indices", indices, torch.int64),
        ("repetition", repetition, torch.float32),
        ("subtrahends", subtrahends, torch.float32),
    ):
        if values.shape != indices.shape or values.dim() != 1 or values.dtype != dtype or not values.is_contiguous():
            raise ValueError(f"{name} must be contiguous [E] {dtype}, not {list(values.shape)} {values.dtype}")
    saved = torch.empty_like(repetition)
    num_entries = len(indices)
    _penalise_kernel[(triton.cdiv(num_entries, BLOCK),)](
        logits, indices, repetition, subtrahends, saved, num_entries, BLOCK=BLOCK,
        # a product and a difference fused would be rounded once
        enable_fp_fusion=False,
    )  # fmt: skip
    return saved


def penalise(logits: Tensor, indices: Tensor, repetition: Tensor, subtrahends: Tensor) -> Tensor:
    """The same with torch."""
    flat = logits.view(-1)
    saved = flat[indices]
    scaled = torch.where(saved < 0, saved * repetition, saved / repetition) - subtrahends
    flat[indices] = torch.where(saved < torch.inf, scaled, saved)
    return saved


def restore(logits: Tensor, indices: Tensor, saved: Tensor) -> None:
    """Undoes `penalise_triton`."""
    logits.view(-1).scatter_(0, indices, saved)
