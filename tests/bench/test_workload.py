"""The seed workload's proportions, and that the same arguments give the same workload."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from noria_bench.workload import prompt_text, seed_workload


def test_outputs_are_in_equal_parts_and_shuffled():
    outputs = [item.max_tokens for item in seed_workload(32).items]
    assert Counter(outputs) == {20: 8, 50: 8, 100: 8, 500: 8}
    assert outputs != sorted(outputs)
    assert outputs[:4] != [20, 50, 100, 500]
    assert seed_workload(32).num_output_tokens == 8 * 670


def test_prompts_stay_in_range_around_the_median():
    lengths = sorted(item.num_prompt_tokens for item in seed_workload(1000).items)
    assert (lengths[0], lengths[-1]) == (16, 512)
    assert 90 < lengths[500] < 110


def test_scale_keeps_the_proportions():
    full, scaled = seed_workload(32), seed_workload(32, scale=0.1)
    for item, small in zip(full.items, scaled.items, strict=True):
        assert small.max_tokens == item.max_tokens / 10
        assert small.num_prompt_tokens == pytest.approx(item.num_prompt_tokens / 10, abs=0.6)


def test_nothing_is_scaled_below_one_token():
    items = seed_workload(8, scale=0.001).items
    assert {(item.num_prompt_tokens, item.max_tokens) for item in items} == {(1, 1)}


def test_deterministic():
    assert seed_workload(8, seed=3) == seed_workload(8, seed=3)
    assert seed_workload(8, seed=3) != seed_workload(8, seed=4)


def test_sampling_forces_the_output_length():
    assert seed_workload(4).sampling == {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("num_tokens", [1, 9, 10, 11, 300])
def test_a_prompt_has_a_word_or_full_stop_per_token(num_tokens):
    text = prompt_text(random.Random(0), num_tokens)
    assert text.startswith("The")
    assert len(text.replace(".", " .").split()) == num_tokens


@pytest.mark.parametrize("arguments", [{"num_requests": 0}, {"scale": 0}, {"scale": float("inf")}])
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be"):
        seed_workload(**arguments)
