"""Log-probabilities on a GPU, for the rows that ask for them: of the drawn token and of the n <= 20 likeliest.

    logprob_i = x_i - max x - log(sum_j exp(x_j - max x))
    rank of token t = 1 + the number of x_i > x_t

The n likeliest, the lowest id first of equals, are the n largest keys (image of x_i, lowest id), each the largest below
the one before, among the groups that can hold one: no sort. One program a row; its pass over all logits takes it an
estimated 20 us for 128k, and what others ask for does not change its sums.

logits [*, V] float32, raw; rows [Q] int32, which of them; token_ids [*] int64, -1 where nothing was drawn
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noria.kernels.language import tl, triton
from noria.kernels.sampling_filters import list_groups
from noria.kernels.sampling_groups import (
    BLOCK,
    GROUP_SIZE,
    GROUPS_PER_TILE,
    bound_of,
    check_logits,
    group_maxima,
    image_of,
    key_of,
    load_listed,
    peak_of,
    score_of,
    split_key,
)

MAX_COUNT = 20


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of Q rows; where nothing was drawn they hold nothing.

    logprobs: [Q] float32, of the token. ranks: [Q] int32.
    top_ids: [Q, 20] int32. top_logprobs: [Q, 20] float32. Of row q the first counts[q] are written.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@triton.jit
def _logprobs_kernel(
    logits,  # [*, V] float32
    rows, counts,  # [Q] int32
    token_ids,  # [*] int64
    maxima, groups,  # [Q, G] int32
    logprobs, ranks,  # [Q] float32, int32
    top_ids, top_logprobs,  # [Q, MAX_COUNT] int32, float32
    vocab_size, num_groups,
    MAX_COUNT: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (Q,)."""
    asked = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + asked).to(tl.int64)
    token_id = tl.load(token_ids + row)
    if token_id >= 0:
        logits += row * vocab_size
        maxima += asked * num_groups
        groups += asked * num_groups
        peak_image, _peak_group = peak_of(maxima, num_groups, BLOCK)
        peak = score_of(peak_image)
        chosen = tl.load(logits + token_id)
        shares = tl.zeros([BLOCK], tl.float32)
        num_larger = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
            shares += tl.exp(x - peak)
            num_larger += (x > chosen).to(tl.int32)
        log_sum = tl.log(tl.sum(shares))
        tl.store(logprobs + asked, chosen - peak - log_sum)
        tl.store(ranks + asked, 1 + tl.sum(num_larger))

        count = tl.load(counts + asked)
        if count > 0:
            bound = bound_of(maxima, num_groups, peak_image, count, BLOCK)
            num_listed = list_groups(maxima, groups, num_groups, bound, None, peak, None, BLOCK)
            key = tl.full((), 2**62, tl.int64)
            for place in range(0, count):
                best = tl.full((), -(2**62), tl.int64)
                for start in range(0, num_listed, ROWS):
                    x, ids = load_listed(logits, groups, start, num_listed, vocab_size, ROWS, GROUP)
                    keys = key_of(image_of(x), ids)
                    best = tl.maximum(best, tl.max(tl.max(tl.where(keys < key, keys, best), 1)))
                key = best
                out = asked * MAX_COUNT + place
                likely_image, likely_id = split_key(key)
                tl.store(top_ids + out, likely_id)
                tl.store(top_logprobs + out, score_of(likely_image) - peak - log_sum)


def token_logprobs_triton(
    logits: Tensor, token_ids: Tensor, rows: Tensor, counts: Tensor, out: Tensor | None = None
) -> TokenLogprobs:
    """Launches only.

    counts: [Q] int32, how many of the likeliest; at most V and 20.
    out: [num_words(Q)] int32, 16-byte aligned, in which the results will lie; None for memory of its own.
    """
    check_logits(logits)
    num_asked = len(rows)
    for name, values in (("rows", rows), ("counts", counts)):
        if values.shape != (num_asked,) or values.dtype != torch.int32:
            raise ValueError(f"{name} must be [{num_asked}] int32, not {list(values.shape)} {values.dtype}")
    if token_ids.dtype != torch.int64 or token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_ids must be [{len(logits)}] int64, not {list(token_ids.shape)} {token_ids.dtype}")
    if out is None:
        out = torch.empty(num_words(num_asked), dtype=torch.int32, device=logits.device)
    result = split_words(out, num_asked)
    maxima = group_maxima(logits, rows)
    _logprobs_kernel[(num_asked,)](
        logits, rows, counts, token_ids, maxima, torch.empty_like(maxima),
        result.logprobs, result.ranks, result.top_ids, result.top_logprobs, logits.shape[1], maxima.shape[1],
        MAX_COUNT=MAX_COUNT, ROWS=GROUPS_PER_TILE, GROUP=GROUP_SIZE, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return result


def num_words(num_asked: int) -> int:
    """Of 4 bytes, for the results of so many rows."""
    return _num_places(num_asked) * (2 + 2 * MAX_COUNT)


def split_words(words: Tensor, num_asked: int) -> TokenLogprobs:
    """The results in `words` [num_words(Q)] int32: views."""
    logprobs, ranks, top_ids, top_logprobs = words.split(
        [_num_places(num_asked) * width for width in (1, 1, MAX_COUNT, MAX_COUNT)]
    )
    return TokenLogprobs(
        logprobs[:num_asked].view(torch.float32),
        ranks[:num_asked],
        top_ids.view(-1, MAX_COUNT)[:num_asked],
        top_logprobs.view(torch.float32).view(-1, MAX_COUNT)[:num_asked],
    )


def _num_places(num_asked: int) -> int:
    # so that each result is 16-byte aligned: Triton compiles another kernel where it is not
    return -(-num_asked // 4) * 4
