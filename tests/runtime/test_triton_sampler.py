"""TritonSampler, kernels in the interpreter, against the sampler in torch, which is the definition."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from noria.runtime.sampling import adjusted_scores, sample
from noria.runtime.triton_sampling import TritonSampler
from noria.sampling_params import SamplingParams
from noria.scheduler_output import RowFailure, SampledToken, SamplingInput
from support.quick_interpreter import quick_interpreter  # noqa: F401

pytestmark = [
    # the interpreter's own, for a loop whose bounds are tensors
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # numpy's, for differences and quotients that are meant to be -inf, and for the NaN of what is then left out
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in:RuntimeWarning"),
]

PROMPT = (3, 1, 4, 1, 5)
OUTPUT = (9, 2, 6, 5, 3, 5)


def item(seed: int = 7, position: int = 11, **params: Any) -> SamplingInput:
    return SamplingInput(SamplingParams(**params), seed, position, PROMPT, OUTPUT)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same(actual: list[SampledToken | RowFailure], expected: list[SampledToken | RowFailure]) -> None:
    """Equal, but for the last bits of log-probabilities. No seed here has its u within such bits of a boundary."""
    assert [rounded(result) for result in actual] == [rounded(result) for result in expected]


def rounded(result: SampledToken | RowFailure) -> object:
    if isinstance(result, RowFailure):
        return result
    top = tuple((token_id, pytest.approx(logprob, abs=2e-6)) for token_id, logprob in result.top_logprobs)
    logprob = None if result.logprob is None else pytest.approx(result.logprob, abs=2e-6)
    return dataclasses.astuple(dataclasses.replace(result, logprob=logprob, top_logprobs=top))


MIXED = [
    item(seed=1, position=30),
    item(seed=2, temperature=0.0),
    item(seed=3, top_k=40, temperature=1.5),
    item(seed=4, top_p=0.9, logprobs=4),
    item(seed=5, min_p=0.05, logprobs=0),
    item(seed=6, top_k=1),
    item(seed=7, repetition_penalty=1.4, temperature=0.6),
    item(seed=2**64 - 8, presence_penalty=1.0, frequency_penalty=-0.5, top_p=0.7, top_k=200),
    item(seed=9, temperature=0.0, repetition_penalty=1.8, frequency_penalty=2.0, logprobs=20),
    SamplingInput(SamplingParams(temperature=1e-300), 10, 0, banned_token_ids=[0, 5, 7]),
    item(seed=11, temperature=4.0),
]


@pytest.mark.parametrize("vocab_size", [13, 997])
def test_results_are_those_of_the_torch_sampler(vocab_size: int) -> None:
    logits = random_logits(len(MIXED), vocab_size)
    before = logits.clone()
    results = TritonSampler()(logits, MIXED)
    assert torch.equal(logits, before)
    assert_same(results, sample(logits, MIXED))


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others() -> None:
    """vllm#5898, #51226; to the last bit of its log-probabilities."""
    logits = random_logits(len(MIXED), 300, seed=1)
    sampler = TritonSampler()
    together = sampler(logits, MIXED)
    order = [8, 3, 10, 0, 7, 2, 9, 1, 6, 4, 5]
    assert sampler(logits[order], [MIXED[row] for row in order]) == [together[row] for row in order]
    for row in (3, 7, 8):
        assert sampler(logits[row : row + 1], [MIXED[row]]) == [together[row]]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.7, "presence_penalty": -1.1, "frequency_penalty": -0.9},
    ],
    ids=str,
)
def test_greedy_tokens_under_penalties_and_bans(params: dict[str, Any]) -> None:
    """Only tokens with a penalty are near the top, so that each of their scores decides some row."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.full((40, 12), -9.0)
    logits[:, :10] = torch.rand(40, 10, generator=generator) * 4 - 2
    inputs = [
        SamplingInput(
            SamplingParams(temperature=0.0, **params), 0, 0, PROMPT, OUTPUT, banned_token_ids=[2, 7][: row % 3]
        )
        for row in range(len(logits))
    ]
    expected = adjusted_scores(logits, inputs).argmax(-1).tolist()
    assert len(set(expected)) > 3
    assert expected != logits.argmax(-1).tolist()
    assert TritonSampler()(logits, inputs) == [SampledToken(token_id) for token_id in expected]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    logits = random_logits(1, 90)
    best = int(logits.argmax())
    row = SamplingInput(SamplingParams(temperature=0.0, logprobs=1), 0, 0, banned_token_ids=[best])
    (result,) = TritonSampler()(logits, [row])
    assert isinstance(result, SampledToken)
    assert result.token_id != best
    assert result.rank == 2
    assert [token_id for token_id, _ in result.top_logprobs] == [best]


@pytest.mark.parametrize("logprobs", [None, 3])
def test_a_row_that_is_not_finite_fails_alone(logprobs: int | None) -> None:
    """vllm#4151: one row's NaN ended the engine. A ban does not hide it."""
    logits = random_logits(4, 70)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    inputs = [item(temperature=0.0, logprobs=logprobs)] * 4
    inputs[1] = dataclasses.replace(inputs[1], banned_token_ids=[5])
    results = TritonSampler()(logits, inputs)
    assert_same(results, sample(logits, inputs))
    assert [isinstance(result, RowFailure) for result in results] == [False, True, True, False]


def test_a_row_whose_tokens_are_all_banned_fails() -> None:
    banned = SamplingInput(SamplingParams(), 0, 0, banned_token_ids=[0, 1, 2])
    (result,) = TritonSampler()(random_logits(1, 3), [banned])
    assert isinstance(result, RowFailure)


def test_tokens_are_on_the_device_before_the_result_is_asked_for() -> None:
    logits = random_logits(3, 40)
    logits[1] = math.nan
    inputs = [item(), item(), item(temperature=0.0, logprobs=2)]
    pending = TritonSampler().enqueue(logits, inputs)
    token_ids = pending.token_ids.clone()
    assert token_ids.dtype == torch.int64
    assert token_ids[1] == -1
    # what comes after must not reach the result
    logits.fill_(0.0)
    results = pending.result()
    assert [row.token_id for row in (results[0], results[2]) if isinstance(row, SampledToken)] == token_ids[
        [0, 2]
    ].tolist()


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="logits have 2 rows, and inputs 1"):
        TritonSampler()(torch.zeros(2, 8), [item()])
    with pytest.raises(ValueError, match="token ids must be from 0 to 7, not 2 to 9"):
        TritonSampler()(torch.zeros(1, 8), [item(presence_penalty=1.0)])
