"""Sampling: one token per row of logits, the same whatever the other rows are.

For row r with logits x [V], temperature T, and K the tokens that the filters keep:

    y = x, with the penalties applied, and -inf for banned tokens
    w_i = floor(2^40 exp((y_i - max y) / T))    for i in K, else 0
    token = the first i, in order of ids, with w_0 + ... + w_i > u (w_0 + ... + w_{V-1})

u in [0, 1) is a hash of the row's seed and position. The weights are integers so that their sums are exact: in any
order, on any device, beside any other rows, and no token without weight can be drawn. What they lose is below what
float32 logits resolve: a token is out when it is more than 2^40 times less likely than the likeliest.
Greedy rows (temperature 0 or top_k 1) take the largest y, the lowest id of equals.
Knows nothing of sequences, stop rules or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput

WEIGHT_BITS = 40
# a weight and an id share one int64 where tokens are ranked; the sum of all weights fits one too
ID_BITS = 22
# torch gives 2^15 elements or more to several threads, and to wake those takes longer than the work on one row
CPU_SLICE = 2**14
# a division by the smallest temperature leaves 0 at the peak and -inf elsewhere
MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
NOTHING_TO_DRAW = "the logits hold NaN or +inf, or leave no token to draw"
_BLOCK = 128
_MASK64 = 2**64 - 1
_FAILED = -1


FindLargest = Callable[[Tensor], tuple[Tensor, Tensor]]


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[R], [R] int64: the largest score of each row, NaN if there is one, and the lowest id that has it."""
    # on the CPU the search for a position is scalar code: 0.5 ms for 8 rows of 49,152, and 0.2 ms when only one block
    # is searched, which vector code has found by its maximum
    width = math.gcd(scores.shape[-1], _BLOCK)
    blocks = scores.unflatten(-1, (-1, width))
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1)
    inside = blocks[torch.arange(len(blocks), device=scores.device), block].argmax(-1)
    return maxima.amax(-1), block * width + inside


def sample(
    logits: Tensor, inputs: Sequence[SamplingInput], find_largest: FindLargest = largest
) -> list[SampledToken | RowFailure]:
    """Draws one token per row.

    logits: [R, V] float32, left unchanged; V at most 2^22. inputs: one per row. find_largest: `largest`, or what does
    the same.
    A row with NaN or +inf, or without any token left to draw, fails alone.
    """
    scores = adjusted_scores(logits, inputs)
    peak, token_ids = find_largest(scores)
    if scores is logits and all(is_greedy(item.params) for item in inputs):
        # each of torch's operators takes longer than this over as many rows as a step has
        ids = [i if math.isfinite(x) else _FAILED for i, x in zip(token_ids.tolist(), peak.tolist(), strict=True)]
        return _results(logits, ids, inputs)
    # a maximum is NaN or +inf if any element is, and -inf if all are
    is_valid = peak.isfinite()
    if scores is not logits:
        is_valid &= logits.amax(-1).isfinite()
    for rows in _groups(inputs, scores.is_cuda):
        # a slice is no copy
        index = rows if len(rows) > 1 else slice(rows[0], rows[0] + 1)
        token_ids[index] = _draw(scores[index], peak[index].unsqueeze(-1), [inputs[row] for row in rows])
    return _results(logits, torch.where(is_valid, token_ids, _FAILED).tolist(), inputs)


def _groups(inputs: Sequence[SamplingInput], is_cuda: bool) -> list[list[int]]:
    """The rows that are not greedy, in the groups in which they are drawn: it affects the time alone.

    On the CPU a row at a time stays in the processor's cache; on a GPU only rows with top_p are to pay for the sorting.
    """
    rows = [row for row, item in enumerate(inputs) if not is_greedy(item.params)]
    if not is_cuda:
        return [[row] for row in rows]
    with_top_p = [row for row in rows if inputs[row].params.top_p < 1]
    without = [row for row in rows if inputs[row].params.top_p == 1]
    return [group for group in (with_top_p, without) if group]


def adjusted_scores(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """[R, V]: the logits with penalties and bans applied; `logits` itself, not a copy, when no row has any.

    Repetition as in Keskar et al. 2019 (CTRL): positive logits of tokens in prompt or output are divided by the
    penalty, negative ones multiplied. Then, as in OpenAI's API, output tokens lose presence + frequency x occurrences.
    """
    scores = logits
    for row, item in enumerate(inputs):
        if item.params.has_penalties or item.banned_token_ids:
            if scores is logits:
                scores = logits.clone()
            _penalise(scores[row], item)
            scores[row, _ids(item.banned_token_ids, logits)] = -torch.inf
    return scores


def _penalise(scores: Tensor, item: SamplingInput) -> None:
    """Applies the penalties to scores [V] in place."""
    params = item.params
    if params.repetition_penalty != 1:
        seen = _ids([*item.prompt_token_ids, *item.output_token_ids], scores)
        values = scores[seen]
        scores[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        ids, counts = _ids(item.output_token_ids, scores).unique(return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(scores: Tensor, peak: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """[R] int64: a token of each row of scores [R, V], by inverse transform sampling in order of ids."""
    params = [item.params for item in inputs]
    if scores.is_cuda or len(params) > 1:
        weights, ids = token_weights(scores, peak, params), None
    else:
        weights, ids = _narrowed_weights(scores, peak, params)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    uniforms = _column([uniform(item.seed, item.position) for item in inputs], scores)
    # the product is rounded, so that it could reach the total
    target = torch.minimum((total * uniforms).long(), total - 1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return index if ids is None else ids[index]


def token_weights(scores: Tensor, peak: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, V] int64: what each token is drawn in proportion to; 0 for those that the filters leave out.

    scores: [R, V] float32. peak: [R, 1], their maxima; where one is not finite the row gets no weights.
    The filters keep what Transformers' warpers keep, in their order: temperature, top_k (and all that equal the k-th),
    top_p (the fewest that reach it; of equals the lowest ids), min_p.
    """
    weights = _exponentials(scores, peak, params)
    if any(has_top_k(item, scores.shape[-1]) for item in params):
        weights.masked_fill_(scores < _kth_largest(scores, params), 0)
    total = weights.sum(-1, keepdim=True)
    return _filter(weights, total, _least_weight(total, scores.shape[-1], params), params)


def _narrowed_weights(scores: Tensor, peak: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor | None]:
    """`token_weights` of one row [1, V], less tokens that are surely out: [1, C], and their ids [C], None for all."""
    ids = None
    vocab_size = scores.shape[-1]
    if has_top_k(params[0], vocab_size):
        # not `>=`: a row with NaN must keep something
        ids = (scores < _kth_largest(scores, params)).logical_not_()[0].nonzero().squeeze(-1)
        scores = scores[:, ids]
    weights = _exponentials(scores, peak, params)
    if params[0].top_p == 1 and params[0].min_p == 0:
        return weights, ids
    total = weights.sum(-1, keepdim=True)
    least = _least_weight(total, vocab_size, params)
    heavy = (weights >= least)[0].nonzero().squeeze(-1)
    return _filter(weights[:, heavy], total, least, params), heavy if ids is None else ids[heavy]


def _exponentials(scores: Tensor, peak: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, V] int64: the weights before any filter."""
    if scores.shape[-1] > 2**ID_BITS:
        raise ValueError(f"a vocabulary has at most {2**ID_BITS} tokens, not {scores.shape[-1]}")
    temperature = _column([max(item.temperature, MIN_TEMPERATURE) for item in params], scores).float()
    weights = torch.empty_like(scores, dtype=torch.int64)
    size = scores.shape[-1] if scores.is_cuda else CPU_SLICE
    for part, out in zip(scores.split(size, -1), weights.split(size, -1), strict=True):
        ratio = part.sub(peak).div_(temperature).exp_().nan_to_num_(0.0)
        out.copy_(ratio.mul_(2.0**WEIGHT_BITS))
    return weights


def _kth_largest(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, 1]: each row's top_k-th largest score; -inf where top_k keeps all."""
    ks = [item.top_k if has_top_k(item, scores.shape[-1]) else 0 for item in params]
    k = torch.tensor(ks, device=scores.device).unsqueeze(-1)
    largest = scores.topk(max(ks), dim=-1).values
    return torch.where(k > 0, largest.gather(-1, (k - 1).clamp(min=0)), -torch.inf)


def _least_weight(total: Tensor, vocab_size: int, params: Sequence[SamplingParams]) -> Tensor:
    """[R, 1] int64: tokens lighter than this are outside top_p or min_p.

    total: [R, 1] int64, the row's weight before the two. For top_p: V tokens lighter than total (1 - top_p) / V weigh
    less than 1 - top_p together, so that none of them is inside. On real text that leaves some hundreds to sort.
    """
    top_p = _column([item.top_p for item in params], total)
    min_p = _column([item.min_p for item in params], total)
    least = torch.maximum((total * (1 - top_p) / vocab_size).ceil(), (min_p * 2.0**WEIGHT_BITS).floor()).long()
    # a row that is not finite has no weights, and keeps all of them
    return torch.minimum(least, total)


def _filter(weights: Tensor, total: Tensor, least: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets weights [R, C] of tokens that top_p and min_p leave out to 0, in place.

    A token is inside top_p if those that rank before it hold less than top_p of total [R, 1]. As only lighter ones than
    `least` [R, 1] may be missing from weights, the ranks are those among all tokens.
    """
    if all(item.top_p == 1 for item in params):
        return weights.masked_fill_(weights < least, 0)
    num_candidates = max(1, int((weights >= least).sum(-1).max()))
    position = torch.arange(weights.shape[-1], device=weights.device)
    rank = (weights << ID_BITS) + (2**ID_BITS - 1 - position)
    leading = rank.topk(num_candidates, dim=-1).values
    mass = leading >> ID_BITS
    is_inside = (mass.cumsum(-1) - mass < total * _column([item.top_p for item in params], weights)) & (mass >= least)
    last = is_inside.sum(-1, keepdim=True).clamp(min=1) - 1
    return weights.masked_fill_(rank < leading.gather(-1, last), 0)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, fixed by a 64-bit seed and a position.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) with the first output
    for the seed as the start of a second stream, of which it is output number position + 1.
    """
    return (splitmix64(splitmix64(seed, 1), position + 1) >> 11) * 2.0**-53


def splitmix64(state: int, step: int) -> int:
    """Output number `step`, from 1, of the SplitMix64 generator that starts in `state`."""
    z = (state + step * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _results(
    logits: Tensor, token_ids: Sequence[int], inputs: Sequence[SamplingInput]
) -> list[SampledToken | RowFailure]:
    """token_ids: one for each row of logits [R, V], or _FAILED."""
    return [
        _result(logits, row, token_id, item.params.logprobs)
        for row, (token_id, item) in enumerate(zip(token_ids, inputs, strict=True))
    ]


def _result(all_logits: Tensor, row: int, token_id: int, num_logprobs: int | None) -> SampledToken | RowFailure:
    """The outcome of one row of [R, V], with log-probabilities of its raw logits if they are asked for."""
    if token_id == _FAILED:
        return RowFailure(NOTHING_TO_DRAW)
    if num_logprobs is None:
        return SampledToken(token_id)
    logits = all_logits[row]
    top_ids = _likeliest(logits, num_logprobs)
    chosen, *top = logits.log_softmax(-1)[[token_id, *top_ids]].tolist()
    rank = 1 + int((logits > logits[token_id]).sum())
    return SampledToken(token_id, chosen, tuple(zip(top_ids, top, strict=True)), rank)


def _likeliest(logits: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest of logits [V], the largest first and the lowest id first of equals."""
    if count == 0:
        return []
    # topk breaks ties as it likes: take its threshold, then sort all that reach it
    threshold = logits.topk(min(count, logits.shape[-1])).values[-1]
    ids = (logits >= threshold).nonzero().squeeze(-1)
    order = logits[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]].tolist()


def is_greedy(params: SamplingParams) -> bool:
    return params.is_greedy or params.top_k == 1


def has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
