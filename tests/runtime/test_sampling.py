"""Sampling against Transformers' logits processors, and each row against itself beside other rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from noria.runtime import sampling
from noria.runtime.sampling import WEIGHT_BITS, _groups, adjusted_scores, sample, splitmix64, token_weights, uniform
from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput

VOCAB_SIZE = 997
PROMPT = (3, 1, 4, 1, 5)
OUTPUT = (9, 2, 6, 5, 3, 5)


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def item(seed: int = 7, position: int = 11, **params: Any) -> SamplingInput:
    return SamplingInput(SamplingParams(**params), seed, position, PROMPT, OUTPUT)


def weights_of(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return token_weights(scores, scores.amax(-1, keepdim=True), params)


def probabilities(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """[R, V] float64: what `sample` draws from."""
    weights = weights_of(adjusted_scores(logits, inputs), [row.params for row in inputs])
    return weights.double() / weights.sum(-1, keepdim=True)


def token_ids(results: Sequence[SampledToken | RowFailure]) -> list[int]:
    assert all(isinstance(result, SampledToken) for result in results)
    return [result.token_id for result in results if isinstance(result, SampledToken)]


def transformers_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[R, V]: the same through Transformers' processors, in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    input_ids = torch.tensor([PROMPT + OUTPUT] * len(logits))
    return processors(input_ids, logits.clone()).softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.5},
        {"top_k": 2},
        {"top_k": 50, "temperature": 0.8},
        {"top_k": VOCAB_SIZE},
        {"top_k": VOCAB_SIZE + 5},
        {"top_k": -1},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6},
        {"temperature": 0.9, "top_k": 100, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1},
        {"temperature": 3.0, "top_p": 0.95, "min_p": 0.1},
    ],
    ids=str,
)
def test_distribution_is_that_of_transformers(params: dict[str, Any]) -> None:
    logits = random_logits(16)
    inputs = [item(**params)] * 16
    ours = probabilities(logits, inputs)
    theirs = transformers_probabilities(logits, inputs[0].params).double()

    is_drawable = theirs >= theirs.amax(-1, keepdim=True) * 2.0**-WEIGHT_BITS
    assert torch.equal(ours > 0, is_drawable)
    # relative: float32 softmax of theirs
    torch.testing.assert_close(ours, torch.where(is_drawable, theirs, 0), rtol=2e-5, atol=1e-12)


def test_banned_tokens_are_those_of_min_new_tokens() -> None:
    logits = random_logits(4)
    eos = [17, 23]
    inputs = [SamplingInput(SamplingParams(), 1, 8, PROMPT, OUTPUT, banned_token_ids=eos)] * 4
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), len(OUTPUT) + 1, eos)
    theirs = processor(torch.tensor([PROMPT + OUTPUT] * 4), logits.clone())

    assert torch.equal(adjusted_scores(logits, inputs), theirs)
    ours = probabilities(logits, inputs)
    assert not ours[:, eos].any()
    torch.testing.assert_close(ours.float(), theirs.softmax(-1), rtol=2e-5, atol=1e-9)


def test_repetition_penalty_equals_transformers_bit_for_bit() -> None:
    logits = random_logits(4)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([PROMPT + OUTPUT] * 4), logits.clone())
    assert torch.equal(adjusted_scores(logits, [item(repetition_penalty=1.3)] * 4), theirs)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = random_logits(1)
    lost = logits - adjusted_scores(logits, [item(presence_penalty=0.5, frequency_penalty=0.25)])
    expected = torch.zeros(VOCAB_SIZE)
    for token_id, occurrences in {9: 1, 2: 1, 6: 1, 5: 2, 3: 1}.items():
        expected[token_id] = 0.5 + 0.25 * occurrences
    torch.testing.assert_close(lost[0], expected)


def test_repetition_is_applied_before_presence() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9] = 4.0
    adjusted = adjusted_scores(logits, [item(repetition_penalty=2.0, presence_penalty=1.0)])
    assert adjusted[0, 9] == 4.0 / 2.0 - 1.0


def test_logits_are_left_unchanged() -> None:
    logits = random_logits(3)
    before = logits.clone()
    sample(
        logits, [item(repetition_penalty=2.0, frequency_penalty=1.0), item(temperature=0.0), item(top_p=0.5, min_p=0.1)]
    )
    assert torch.equal(logits, before)


def test_top_p_keeps_the_fewest_tokens_and_of_equals_the_lowest_ids() -> None:
    probability = torch.tensor([[0.1, 0.2, 0.1, 0.4, 0.1, 0.1]])
    kept = probabilities(probability.log(), [item(top_p=0.75)])[0] > 0
    assert kept.tolist() == [True, True, True, True, False, False]


def test_top_k_keeps_all_that_equal_the_kth() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = probabilities(logits, [item(top_k=2)])[0] > 0
    assert kept.tolist() == [False, True, True, True, False]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, [40, 300, 800]] = 5.0
    assert (
        token_ids(sample(logits, [item(temperature=0.0), item(top_k=1), item(temperature=0.0, top_p=0.1)])) == [40] * 3
    )


def test_greedy_does_not_draw_a_banned_token() -> None:
    logits = random_logits(1)
    best, second = logits.topk(2).indices[0].tolist()
    banned = SamplingInput(SamplingParams(temperature=0.0), 0, 0, banned_token_ids=[best])
    assert token_ids(sample(logits, [banned])) == [second]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-10])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(4) * 1e30
    assert token_ids(sample(logits, [item(temperature=temperature)] * 4)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.7}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Pearson's chi-square over 1,500 positions; seeds are fixed, so that the figure never changes."""
    num_draws, vocab_size = 1500, 12
    logits = torch.linspace(-2, 2, vocab_size).roll(5).expand(num_draws, vocab_size)
    inputs = [item(seed=20, position=position, **params) for position in range(num_draws)]
    counts = torch.bincount(torch.tensor(token_ids(sample(logits, inputs))), minlength=vocab_size)
    expected = probabilities(logits[:1], inputs[:1])[0] * num_draws

    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[kept].sum().item()
    degrees = int(kept.sum()) - 1
    # mean `degrees`, variance 2 `degrees`: four standard deviations
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(5, position) for position in range(8000)], [uniform(seed, 5) for seed in range(8000)]):
        assert all(0 <= number < 1 for number in numbers)
        assert len(set(numbers)) == len(numbers)
        counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), bins=20, min=0, max=1)
        chi_square = ((counts - 400) ** 2 / 400).sum().item()
        assert chi_square < 19 + 4 * math.sqrt(38)


def test_uniform_numbers_of_neighbouring_seeds_are_unrelated() -> None:
    first, second = (torch.tensor([uniform(seed, position) for position in range(4000)]) for seed in (100, 101))
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(4000)
    # nor is one stream the other, a few positions on
    assert not set(first.tolist()) & set(second.tolist())


def test_the_hash_is_splitmix64() -> None:
    """First outputs for the state 1234567 as published with the generator's reference code."""
    assert [splitmix64(1234567, step) for step in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize(("number", "token_id"), [(0.0, 4), (1 - 2.0**-53, 6)])
@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"top_p": 0.999}], ids=str)
def test_the_ends_of_the_unit_interval_draw_tokens_with_weight(
    monkeypatch: pytest.MonkeyPatch, number: float, token_id: int, params: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: number)
    logits = torch.full((1, 12), -math.inf)
    logits[0, 4:7] = torch.tensor([1.0, 2.0, 0.5])
    assert token_ids(sample(logits, [item(**params)])) == [token_id]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_below_one_for_every_seed(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


MIXED = [
    item(seed=1, position=30),
    item(seed=2, temperature=0.0),
    item(seed=3, top_k=40),
    item(seed=4, top_k=3, temperature=1.5),
    item(seed=5, top_p=0.9, logprobs=4),
    item(seed=6, min_p=0.05),
    item(seed=7, top_k=1),
    item(seed=8, repetition_penalty=1.4, temperature=0.6),
    item(seed=9, presence_penalty=1.0, frequency_penalty=-0.5, top_p=0.7, top_k=200),
    item(seed=10, temperature=0.0, repetition_penalty=1.8, logprobs=20),
    SamplingInput(SamplingParams(), 11, 0, banned_token_ids=[0, 5, 7]),
]


@pytest.mark.parametrize("vocab_size", [13, 997, 40001])
def test_a_row_does_not_depend_on_the_others(vocab_size: int) -> None:
    """vllm#5898, #51226: greedy and seeded tokens changed with what else was in the batch."""
    logits = random_logits(len(MIXED), vocab_size)
    alone = [sample(logits[row : row + 1], [MIXED[row]])[0] for row in range(len(MIXED))]
    assert sample(logits, MIXED) == alone

    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(3)).tolist()
    assert sample(logits[order], [MIXED[row] for row in order]) == [alone[row] for row in order]

    others = random_logits(len(MIXED), vocab_size, seed=1) * 5
    others[4] = logits[4]
    others[6] = torch.nan
    assert sample(others, MIXED)[4] == alone[4]


def test_weights_of_a_row_do_not_depend_on_the_others() -> None:
    """The batched form, as a GPU runs it: top_k, top_p and min_p of every row side by side."""
    logits = random_logits(len(MIXED))
    params = [row.params for row in MIXED]
    batched = weights_of(logits, params)
    for row in range(len(MIXED)):
        assert torch.equal(batched[row : row + 1], weights_of(logits[row : row + 1], params[row : row + 1]))


@pytest.mark.parametrize("vocab_size", [13, 997, 40001])
def test_rows_drawn_side_by_side_as_on_a_gpu_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    logits = random_logits(len(MIXED), vocab_size)
    logits[2] = torch.nan
    one_by_one = sample(logits, MIXED)
    monkeypatch.setattr(sampling, "_groups", lambda inputs, is_cuda: _groups(inputs, is_cuda=True))
    assert sample(logits, MIXED) == one_by_one


def test_seed_and_position_decide_the_token() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)

    def draw(seed: int, position: int) -> int:
        return token_ids(sample(logits, [SamplingInput(SamplingParams(), seed, position)]))[0]

    assert draw(1, 1) == draw(1, 1)
    assert len({draw(1, position) for position in range(50)}) > 40
    assert len({draw(seed, 1) for seed in range(50)}) > 40


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 3}], ids=str
)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    """vllm#4151: one row's NaN ended the engine."""
    logits = random_logits(3)
    clean = sample(logits, [item(**params)] * 3)
    logits[1, 123] = bad
    results = sample(logits, [item(**params)] * 3)
    assert isinstance(results[1], RowFailure)
    assert [results[0], results[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9, "logprobs": 2}], ids=str)
def test_a_row_of_nothing_else_fails_alone(fill: float, params: dict[str, Any]) -> None:
    logits = random_logits(2)
    logits[0] = fill
    failed, drawn = sample(logits, [item(**params)] * 2)
    assert isinstance(failed, RowFailure)
    assert isinstance(drawn, SampledToken)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_banned_fails(temperature: float) -> None:
    logits = random_logits(1, vocab_size=4)
    banned = SamplingInput(SamplingParams(temperature=temperature), 0, 0, banned_token_ids=[0, 1, 2, 3])
    assert isinstance(sample(logits, [banned])[0], RowFailure)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_at_a_banned_token_still_fails(temperature: float) -> None:
    logits = random_logits(1)
    logits[0, 5] = math.nan
    banned = SamplingInput(SamplingParams(temperature=temperature), 0, 0, banned_token_ids=[5])
    assert isinstance(sample(logits, [banned])[0], RowFailure)


def test_tokens_at_minus_infinity_are_not_drawn_and_do_no_harm() -> None:
    logits = torch.full((200, VOCAB_SIZE), -math.inf)
    logits[:, [8, 9]] = 1.0
    inputs = [item(position=position, top_p=0.99, top_k=500) for position in range(200)]
    assert set(token_ids(sample(logits, inputs))) == {8, 9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_raw_distribution(temperature: float) -> None:
    logits = random_logits(3)
    inputs = [item(temperature=temperature, logprobs=5, repetition_penalty=2.0, top_k=7)] * 3
    for row, result in enumerate(sample(logits, inputs)):
        assert isinstance(result, SampledToken)
        expected = logits[row].log_softmax(-1)
        assert result.logprob == expected[result.token_id].item()
        values, ids = expected.topk(5)
        assert result.top_logprobs == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_logprobs_break_ties_by_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 500] = 1.0
    (result,) = sample(logits, [item(temperature=0.0, logprobs=4)])
    assert isinstance(result, SampledToken)
    assert [token_id for token_id, _ in result.top_logprobs] == [500, 0, 1, 2]


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    none, chosen_only, more_than_there_are = sample(
        random_logits(3, vocab_size=6), [item(), item(logprobs=0), item(logprobs=20)]
    )
    assert isinstance(none, SampledToken)
    assert isinstance(chosen_only, SampledToken)
    assert isinstance(more_than_there_are, SampledToken)
    assert (none.logprob, none.top_logprobs) == (None, ())
    assert chosen_only.logprob is not None
    assert chosen_only.top_logprobs == ()
    assert len(more_than_there_are.top_logprobs) == 6


def test_a_vocabulary_beyond_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 4194304"):
        weights_of(torch.zeros(1, 2**22 + 1), [SamplingParams()])


params_strategy = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0, 100)),
    top_k=st.integers(-1, 40),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logprobs=st.none() | st.integers(0, 20),
)
logit_strategy = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 1.0, -math.inf]),
    st.floats(-20, 20),
)


@settings(deadline=None)
@given(
    st.lists(logit_strategy, min_size=1, max_size=30),
    params_strategy,
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 29), max_size=5),
)
def test_any_parameters_draw_a_token_with_weight_or_fail(
    values: list[float], params: SamplingParams, seed: int, output: list[int]
) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    row = SamplingInput(params, seed, 3, (), [token_id % len(values) for token_id in output])
    scores = adjusted_scores(logits, [row])
    (result,) = sample(logits, [row])
    if not scores.amax().isfinite() or not logits.amax().isfinite():
        assert isinstance(result, RowFailure)
        return
    assert isinstance(result, SampledToken)
    if params.temperature == 0 or params.top_k == 1:
        assert result.token_id == scores.argmax()
    else:
        weights = weights_of(scores, [params])
        assert weights[0, result.token_id] > 0
        # the likeliest token passes every filter
        assert weights.max() == 2**WEIGHT_BITS


@settings(deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=40), st.floats(0.01, 0.999), st.floats(0.2, 5))
def test_top_p_reaches_its_share_with_as_few_tokens_as_it_can(
    values: list[float], top_p: float, temperature: float
) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    params = SamplingParams(top_p=top_p, temperature=temperature)
    everything = weights_of(logits, [dataclasses.replace(params, top_p=1.0)])[0]
    kept = weights_of(logits, [params])[0]
    share = top_p * int(everything.sum())
    assert int(kept.sum()) >= share * (1 - 1e-12)
    assert int(kept.sum()) - int(kept[kept > 0].min()) < share * (1 + 1e-12)
    assert int(everything[kept == 0].max() if (kept == 0).any() else 0) <= int(kept[kept > 0].min())
