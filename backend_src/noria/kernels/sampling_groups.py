"""Groups of the vocabulary, by whose largest scores the sampling kernels find the few ids that matter.

The scores of a row stand in G groups of GROUP_SIZE ids. `group_maxima` has many programs a row; what follows it, with
one program a row, need look only into groups whose maximum passes: for the k largest scores that is some k groups.
Scores are ranked through images: int32 in the order of float32, -0 as 0, NaN above all.

logits [R, V] float32, V at most 2^22; maxima [R, G] int32, images
"""

from __future__ import annotations

import torch
from torch import Tensor

from noria.kernels.language import tl, triton

MAX_VOCAB_SIZE = 2**22
# 256 bytes: small, so that few other ids come along with the likely ones; 128k ids are 2,004 groups, one BLOCK of them
GROUP_SIZE = 64
BLOCK = 2048
# where many programs share a row, and where one goes through its list: 64 there would take 234 registers a thread
GROUPS_PER_PROGRAM = 64
GROUPS_PER_TILE = 32

INDEX_BITS = tl.constexpr(22)
# a pass of a search compares every value with so many, and divides what is left to search by one more
NUM_PIVOTS = tl.constexpr(4)
IMAGE_OF_NAN = tl.constexpr(0x7FFFFFFF)
IMAGE_OF_INFINITY = tl.constexpr(0x7F800000)
IMAGE_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def image_of(x):
    """int32 in the order of x float32: -0 as 0, NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & IMAGE_OF_NAN), IMAGE_OF_NAN)


@triton.jit
def score_of(image):
    """The float32 of an image."""
    return (image ^ ((image >> 31) & IMAGE_OF_NAN)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(image, index):
    """int64, larger for a larger image, and of equals for the lower index; index below 2^22."""
    return (image.to(tl.int64) << INDEX_BITS) - index


@triton.jit
def split_key(key):
    """int32 image and index."""
    image = (key + (2**INDEX_BITS - 1)) >> INDEX_BITS
    return image.to(tl.int32), ((image << INDEX_BITS) - key).to(tl.int32)


@triton.jit
def load_groups(scores, groups, is_group, vocab_size, GROUP: tl.constexpr):
    """[N, GROUP]: the scores of `groups` [N], -inf beyond the vocabulary, and their ids."""
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(scores + ids, mask=is_group[:, None] & (ids < vocab_size), other=float("-inf")), ids


@triton.jit
def load_listed(scores, groups, start, num_listed, vocab_size, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The same for ROWS entries of the list of groups, from `start`; past its end -inf, and ids past the vocabulary."""
    position = start + tl.arange(0, ROWS)
    is_listed = position < num_listed
    listed = tl.load(groups + position, mask=is_listed, other=tl.cdiv(vocab_size, GROUP))
    return load_groups(scores, listed, is_listed, vocab_size, GROUP)


@triton.jit
def peak_of(maxima, num_groups, BLOCK: tl.constexpr):
    """The image of the row's largest score, and the first group that has it."""
    best = tl.full((), -(2**62), tl.int64)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        image = tl.load(maxima + group, mask=group < num_groups, other=IMAGE_OF_MINUS_INFINITY)
        best = tl.maximum(best, tl.max(key_of(image, group)))
    return split_key(best)


@triton.jit
def pivot_of(low, high, place):
    """int64: where NUM_PIVOTS pivots, at places from 0, divide the interval from low to high."""
    return low + (high - low) * (place + 1) // (NUM_PIVOTS + 1)


@triton.jit
def narrow(low, high, above, reach, pivots, found, limit):
    """One step of a search for the smallest t with sum(values at images > t) < limit, which is in (low, high].

    above, reach: that sum at high and at low. found: at each of the pivots.
    """
    is_below = found.to(tl.float64) < limit
    return (
        tl.max(tl.where(is_below, low, pivots)),
        tl.min(tl.where(is_below, pivots, high)),
        tl.max(tl.where(is_below, found, above)),
        tl.min(tl.where(is_below, reach, found)),
    )


@triton.jit
def bound_of(maxima, num_groups, peak_image, k, BLOCK: tl.constexpr):
    """An image not above that of the row's k-th largest score: nearly the k-th largest maximum of a group."""
    low = tl.full((), IMAGE_OF_MINUS_INFINITY, tl.int64) - 1
    high = peak_image.to(tl.int64)
    above = tl.full((), 0, tl.int64)
    reach = above
    # 2^16 images are 1 % of a score: no more groups than that pass for it, and half of the passes are saved
    while high - low > 65536:
        pivots = pivot_of(low, high, tl.arange(0, NUM_PIVOTS))
        found = tl.zeros([NUM_PIVOTS], tl.int64)
        for start in range(0, num_groups, BLOCK):
            group = start + tl.arange(0, BLOCK)
            image = tl.load(maxima + group, mask=group < num_groups, other=IMAGE_OF_MINUS_INFINITY)
            found += tl.sum((image[None, :] > pivots.to(tl.int32)[:, None]).to(tl.int32), 1)
        low, high, above, reach = narrow(low, high, above, reach, pivots, found, k.to(tl.float64))
    return (low + 1).to(tl.int32)


@triton.jit
def _maxima_kernel(
    logits,  # [*, V] float32
    rows,  # [R] int32, which rows of them, or None for all
    maxima,  # [R, G] int32, images
    vocab_size, num_groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of ROWS groups, R): the image of each group's largest score."""
    out_row = tl.program_id(1).to(tl.int64)
    row = out_row
    if rows is not None:
        row = tl.load(rows + out_row).to(tl.int64)
    groups = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_group = groups < num_groups
    x, _ids = load_groups(logits + row * vocab_size, groups, is_group, vocab_size, GROUP)
    tl.store(maxima + out_row * num_groups + groups, tl.max(image_of(x), 1), mask=is_group)


def check_logits(logits: Tensor) -> None:
    """Raises ValueError for what the kernels do not take."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous [R, V] float32, not {list(logits.shape)} {logits.dtype}")
    if not 0 < logits.shape[1] <= MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary has 1 to {MAX_VOCAB_SIZE} tokens, not {logits.shape[1]}")


def group_maxima(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """[R, G] int32: see the head of the file. rows: [R] int32, which rows of logits [*, V]; None for all."""
    num_rows, vocab_size = logits.shape
    if rows is not None:
        num_rows = len(rows)
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    maxima = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    grid = (triton.cdiv(num_groups, GROUPS_PER_PROGRAM), num_rows)
    _maxima_kernel[grid](logits, rows, maxima, vocab_size, num_groups, ROWS=GROUPS_PER_PROGRAM, GROUP=GROUP_SIZE)
    return maxima
