"""What a runner makes of given tokens: logits at every position, greedy answers, and how two runners' results compare.

Tokens go through the runner's decoder and cache in chunks, as the engine computes a long prompt, so that whatever the
cache rounds is in the logits. Knows nothing of variants, texts or tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noria.runtime.input_batch import InputBatch
from noria.runtime.model_runner import ModelRunner
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken, SamplingInput, ScheduledSequence, SchedulerOutput

CHUNK_TOKENS = 256

_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Answer:
    """token_ids: with the end token, where one came before max_tokens."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TextComparison:
    """Over all predicted tokens of a text. Logarithms are natural; standard errors take tokens as independent.

    log_ratio: mean of the variant's negative log-likelihoods less the reference's: log of the perplexities' ratio.
    kl: mean over positions of KL(reference || variant), of the next token.
    """

    num_predicted: int
    perplexity: float
    log_ratio: float
    log_ratio_error: float
    kl: float
    kl_error: float


@dataclass(frozen=True)
class AnswerComparison:
    """forced_share: of the reference's output positions, where the variant picks the same after the same tokens.

    mean_equal_tokens: from the start until the first that differs, each going on by its own. mean_tokens: the
    reference's, what the former could be at most. equal_share: of the answers, those wholly equal.
    """

    num_positions: int
    forced_share: float
    mean_equal_tokens: float
    mean_tokens: float
    equal_share: float


def windows(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive ones, each scored without what came before; the last may be shorter, but holds two tokens."""
    cut = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    return [window for window in cut if len(window) > 1]


def num_blocks_for(window_size: int, prompts: Sequence[Sequence[int]], max_answer_tokens: int, block_size: int) -> int:
    """Blocks of a cache that holds a window, and at another time all the answers together."""
    answers = sum(-(-(len(prompt) + max_answer_tokens) // block_size) for prompt in prompts)
    return max(-(-window_size // block_size), answers)


@torch.inference_mode()
def log_probs(runner: ModelRunner, token_ids: Sequence[int], first: int = 0) -> Iterator[Tensor]:
    """What may follow each token from index `first` on, but not the last: [len(token_ids) - 1 - first, vocab_size]
    in float32, in pieces of one chunk each.
    """
    known = token_ids[:-1]
    cache = runner.cache
    for start in range(0, len(known), CHUNK_TOKENS):
        chunk = known[start : start + CHUNK_TOKENS]
        table = range(-(-(start + len(chunk)) // cache.block_size))
        row = ScheduledSequence(0, chunk, num_computed_tokens=start, block_table=table, sampling=None)
        inputs = InputBatch.build([row], cache.block_size, cache.num_blocks)
        batch = inputs.decoder_input(runner.decoder.device)
        wanted = torch.arange(min(max(first - start, 0), len(chunk)), len(chunk), device=runner.decoder.device)
        logits = runner.decoder.forward(replace(batch, logit_indices=wanted), cache.layers)
        if len(wanted):
            yield logits.cpu().log_softmax(-1)


def compare_text(
    texts: Sequence[Sequence[int]], ours: Iterable[Iterable[Tensor]], reference: Sequence[Sequence[Tensor]]
) -> TextComparison:
    """ours, reference: of each text, what `log_probs` gave for the variant, and for the reference."""
    losses, differences, divergences = [], [], []
    for token_ids, own, expected in zip(texts, ours, reference, strict=True):
        targets = torch.tensor(token_ids[1:]).split(CHUNK_TOKENS)
        for q, p, target in zip(own, expected, targets, strict=True):
            loss, expected_loss = (-one.gather(-1, target[:, None])[:, 0] for one in (q, p))
            losses.append(loss)
            differences.append(loss - expected_loss)
            divergences.append(p.sub(q).mul_(p.exp()).sum(-1))
    loss, difference, divergence = (torch.cat(parts).double() for parts in (losses, differences, divergences))
    root = math.sqrt(len(loss))
    return TextComparison(
        num_predicted=len(loss),
        perplexity=loss.mean().exp().item(),
        log_ratio=difference.mean().item(),
        log_ratio_error=difference.std().item() / root,
        # float32 sums may fall below what cannot be negative
        kl=max(divergence.mean().item(), 0.0),
        kl_error=divergence.std().item() / root,
    )


def forced_choices(runner: ModelRunner, answer: Answer) -> list[int]:
    """The likeliest token at each position of the answer, after the answer's own earlier tokens."""
    token_ids = (*answer.prompt_token_ids, *answer.token_ids)
    pieces = log_probs(runner, token_ids, first=len(answer.prompt_token_ids) - 1)
    return [choice for piece in pieces for choice in piece.argmax(-1).tolist()]


def greedy_answers(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: int, end_token_ids: Collection[int]
) -> list[Answer]:
    """All prompts in one batch, which may not change what any of them is answered. Raises RuntimeError."""
    block_size = runner.cache.block_size
    sequences = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + max_tokens for prompt in prompts]
    tables, num_used = [], 0
    for end in ends:
        num_blocks = -(-end // block_size)
        tables.append(range(num_used, num_used + num_blocks))
        num_used += num_blocks
    live = list(range(len(prompts)))
    is_first = True
    while live:
        rows = tuple(_row(index, sequences[index], tables[index], is_first) for index in live)
        # prompts one by one: together they would be a step of thousands of tokens
        for step in [(row,) for row in rows] if is_first else [rows]:
            for index, drawn in runner.execute(SchedulerOutput(step=0, rows=step)).items():
                if not isinstance(drawn, SampledToken):
                    raise RuntimeError(f"prompt {index}: {drawn.message}")
                sequences[index].append(drawn.token_id)
        is_first = False
        live = [i for i in live if len(sequences[i]) < ends[i] and sequences[i][-1] not in end_token_ids]
    return [
        Answer(tuple(prompt), tuple(sequence[len(prompt) :]))
        for prompt, sequence in zip(prompts, sequences, strict=True)
    ]


def _row(index: int, sequence: Sequence[int], table: range, is_first: bool) -> ScheduledSequence:
    num_computed = 0 if is_first else len(sequence) - 1
    sampling = SamplingInput(_GREEDY, seed=0, position=len(sequence))
    return ScheduledSequence(index, sequence[num_computed:], num_computed, table, sampling)


def compare_answers(
    reference: Sequence[Answer], forced: Sequence[Sequence[int]], own: Sequence[Answer]
) -> AnswerComparison:
    """forced: of each of the reference's answers, the variant's `forced_choices`. own: the variant's answers."""
    expected = [answer.token_ids for answer in reference]
    num_positions = sum(map(len, expected))
    num_same = sum(
        token == choice
        for tokens, choices in zip(expected, forced, strict=True)
        for token, choice in zip(tokens, choices, strict=True)
    )
    pairs = list(zip(expected, (answer.token_ids for answer in own), strict=True))
    return AnswerComparison(
        num_positions=num_positions,
        forced_share=num_same / num_positions,
        mean_equal_tokens=sum(num_equal_tokens(*pair) for pair in pairs) / len(pairs),
        mean_tokens=num_positions / len(expected),
        equal_share=sum(theirs == ours for theirs, ours in pairs) / len(pairs),
    )


def num_equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """From the start until the first that differs, or an end."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
