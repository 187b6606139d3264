"""The filters of the sampling kernels: weights of tokens, and the thresholds of top_k and top_p among listed groups.

Inlined into the kernels of sampling.py, where the definition stands. One program works on one row; x are its scores,
groups [G] int32 its list of groups, sums [G] int64 one number for each group of the list.
"""

from __future__ import annotations

from noria.kernels.language import tl, triton
from noria.kernels.sampling_groups import (
    IMAGE_OF_MINUS_INFINITY,
    NUM_PIVOTS,
    image_of,
    load_groups,
    load_listed,
    narrow,
    pivot_of,
    score_of,
)

PEAK_WEIGHT = tl.constexpr(2.0**40)
# the image of a weight is its float32 bits: those of the largest, and of the least that is not 0
IMAGE_OF_PEAK_WEIGHT = tl.constexpr((127 + 40) << 23)
IMAGE_OF_ONE = tl.constexpr(127 << 23)


@triton.jit
def weight_of(scores, peak, temperature):
    """float32 whole numbers, which have all bits of the int64 ones."""
    return tl.floor(tl.exp(tl.div_rn(scores - peak, temperature)) * PEAK_WEIGHT)


@triton.jit
def list_groups(maxima, groups, num_groups, bound, least, peak, temperature, BLOCK: tl.constexpr):
    """Writes the groups with a token whose image reaches `bound` and whose weight reaches `least`, if it is not None.

    Returns how many. A group is judged by its largest score; the 2^-16 makes up for an exp that need not be monotonic.
    """
    num_listed = tl.full((), 0, tl.int32)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        image = tl.load(maxima + group, mask=group < num_groups, other=IMAGE_OF_MINUS_INFINITY)
        is_in = (group < num_groups) & (image >= bound)
        if least is not None:
            weight = weight_of(score_of(image), peak, temperature).to(tl.int64)
            is_in = is_in & (weight + (weight >> 16) + 1 >= least)
        position = num_listed + tl.cumsum(is_in.to(tl.int32)) - 1
        tl.store(groups + position, group, mask=is_in)
        num_listed += tl.sum(is_in.to(tl.int32))
    # other threads read them
    tl.debug_barrier()
    return num_listed


@triton.jit
def search(
    scores, groups, num_listed, vocab_size, low, high, reach, limit, peak, temperature, kth,
    IS_MASS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The smallest t in (low, high] such that the listed tokens above t are fewer, or together lighter, than `limit`.

    IS_MASS: t is a weight's image, and tokens below kth count nothing; else t is a score's image, and each counts 1.
    reach: the sum above low. Returns t, the sum above t, and the sum above t - 1.
    """
    above = tl.full((), 0, tl.int64)
    places = tl.arange(0, NUM_PIVOTS)
    while high - low > 1:
        found = tl.zeros([NUM_PIVOTS], tl.int64)
        for start in range(0, num_listed, ROWS):
            x, _ids = load_listed(scores, groups, start, num_listed, vocab_size, ROWS, GROUP)
            image = image_of(x)
            if IS_MASS:
                weight = weight_of(x, peak, temperature)
                value = tl.where(image >= kth, weight, 0.0).to(tl.int64)
                image = weight.to(tl.int32, bitcast=True)
            else:
                value = tl.full([ROWS, GROUP], 1, tl.int64)
            for place in tl.static_range(NUM_PIVOTS):
                is_above = image > pivot_of(low, high, place).to(tl.int32)
                found += tl.where(places == place, tl.sum(tl.sum(tl.where(is_above, value, 0), 1)), 0)
        low, high, above, reach = narrow(low, high, above, reach, pivot_of(low, high, places), found, limit)
    return high, above, reach


@triton.jit
def kept_weight(x, ids, peak, temperature, kth, least, edge, last_id):
    """int64 weights; 0 for what top_k (score image under kth), min_p (under least) and top_p leave out.

    Of the weight `edge`, the lightest inside top_p, ids up to last_id are kept.
    """
    weight = weight_of(x, peak, temperature)
    value = weight.to(tl.int64)
    is_inside = (weight > edge) | ((weight == edge) & (ids <= last_id))
    return tl.where((image_of(x) >= kth) & (value >= least) & is_inside, value, 0)


@triton.jit
def locate(values, count, target, BLOCK: tl.constexpr):
    """The first position with values[0] + ... + values[position] > target, and target less the sum before it."""
    position = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int64)
    before = passed
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < count, other=0)
        cumulative = before + tl.cumsum(value)
        is_passed = cumulative <= target
        position += tl.sum(is_passed.to(tl.int32))
        passed = tl.maximum(passed, tl.max(tl.where(is_passed, cumulative, 0)))
        before += tl.sum(value)
    return position, target - passed


@triton.jit
def total_of(values, count, BLOCK: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(values + index, mask=index < count, other=0))
    return total


@triton.jit
def edge_of_top_p(
    scores, groups, sums, num_listed, vocab_size, limit, total, peak, temperature, kth,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lightest weight inside top_p, which those heavier leave below `limit`, and the last id that has it and is in.

    Overwrites sums.
    """
    low = tl.full((), IMAGE_OF_ONE, tl.int64) - 1
    high = tl.full((), IMAGE_OF_PEAK_WEIGHT, tl.int64)
    image, above, reach = search(
        scores, groups, num_listed, vocab_size, low, high, total, limit, peak, temperature, kth, True, ROWS, GROUP
    )
    edge = image.to(tl.int32).to(tl.float32, bitcast=True)
    weight = edge.to(tl.int64)
    # number n of them, from 0, is in if above + n weight < limit, rounded as the definition rounds it
    num_in = tl.ceil((limit - above.to(tl.float64)) / edge.to(tl.float64)).to(tl.int64)
    num_in -= ((above + (num_in - 1) * weight).to(tl.float64) >= limit).to(tl.int64)
    num_in += ((above + num_in * weight).to(tl.float64) < limit).to(tl.int64)
    last_id = vocab_size
    if num_in * weight < reach - above:
        for start in range(0, num_listed, ROWS):
            x, _ids = load_listed(scores, groups, start, num_listed, vocab_size, ROWS, GROUP)
            is_edge = (image_of(x) >= kth) & (weight_of(x, peak, temperature) == edge)
            position = start + tl.arange(0, ROWS)
            tl.store(sums + position, tl.sum(is_edge.to(tl.int64), 1), mask=position < num_listed)
        tl.debug_barrier()
        position, rest = locate(sums, num_listed, num_in - 1, BLOCK)
        group = tl.load(groups + position + tl.arange(0, 1))
        x, ids = load_groups(scores, group, group >= 0, vocab_size, GROUP)
        is_edge = (image_of(x) >= kth) & (weight_of(x, peak, temperature) == edge)
        last_id = tl.min(ids) + tl.sum((tl.cumsum(is_edge.to(tl.int64), 1) <= rest).to(tl.int32))
        # before they are overwritten again
        tl.debug_barrier()
    return edge, last_id
