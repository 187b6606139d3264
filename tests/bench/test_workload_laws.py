"""Laws of lengths as they are written, and what is said of those that are written wrongly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from noria_bench.errors import BenchError
from noria_bench.length_laws import LAW_FORMS, parse_law
from noria_bench.lengths import (
    ClampedLognormalLength,
    ConstantLength,
    ExponentialLength,
    LengthLaw,
    LognormalLength,
    MixedLength,
    UniformLength,
    draw_lengths,
)
from noria_bench.workload import seed_workload


@pytest.mark.parametrize(
    ("written", "law"),
    [
        (64, ConstantLength(64)),
        ("constant:64", ConstantLength(64)),
        ("uniform:1:128", UniformLength(1, 128)),
        ({"law": "uniform", "low": 1, "high": 128}, UniformLength(1, 128)),
        ("exponential:128:1536", ExponentialLength(128, 1536)),
        ("exponential:12.5:100", ExponentialLength(12.5, 100)),
        ("lognormal:128:0.8", LognormalLength(128, 0.8)),
        ({"law": "lognormal", "cap": 512, "cv": 0.8, "mean": 128}, LognormalLength(128, 0.8, 512)),
        ("mix:20:50", MixedLength((20, 50))),
        ({"law": "mix", "lengths": [20, 50]}, MixedLength((20, 50))),
        ("seed_mix", MixedLength((20, 50, 100, 500))),
        ("seed_prompts", ClampedLognormalLength(100, 0.7, 16, 512)),
    ],
)
def test_a_law_is_a_number_a_text_or_a_mapping(written: object, law: LengthLaw) -> None:
    assert parse_law(written) == law


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("exponential:3", r"field must be a law of lengths as exponential:MEAN:CAP, not 'exponential:3'"),
        ("lognormal:1:2:3:4", r"as lognormal:MEAN:CV\[:CAP\]"),
        ("uniform:1:x", "as uniform:LOW:HIGH"),
        ("uniform:9:3", "high must be a finite number of at least 9, not 3"),
        ("uniform:1.5:3", "low must be a whole number, not 1.5"),
        ("exponential:nan:3", "mean must be a finite number"),
        ("mix", "lengths must not be empty"),
        ("mix:0", "lengths must be a finite number of at least 1"),
        ("seed_mix:3", "as seed_mix, not"),
        (0, "length must be a finite number of at least 1, not 0"),
        ({"law": "constant", "lenght": 3}, "as constant:LENGTH, not"),
        ({"law": "constant", "length": True}, "length must be a finite number, not True"),
        ({"mean": 3}, "must be a law of lengths as constant:LENGTH, uniform:LOW:HIGH, exponential"),
        ({"law": ["mix"]}, "must be a law of lengths"),
        ("zipf:2", "mix:LENGTH:LENGTH..., seed_mix, seed_prompts, not 'zipf:2'"),
        (12.5, "must be a whole number or a law"),
        (True, "must be a whole number or a law"),
        (None, "must be a whole number or a law"),
    ],
)
def test_a_law_that_is_written_wrongly_is_named_with_what_is_valid(written: object, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_law(written, "field")


def test_the_forms_are_complete() -> None:
    assert LAW_FORMS.startswith("constant:LENGTH, uniform:LOW:HIGH, exponential:MEAN:CAP, lognormal:MEAN:CV[:CAP], ")


def test_a_mix_has_equal_parts_in_no_order() -> None:
    lengths = draw_lengths(MixedLength((20, 50, 100, 500)), 42, seed=1)
    assert Counter(lengths) == {20: 11, 50: 11, 100: 10, 500: 10}
    assert lengths != draw_lengths(MixedLength((20, 50, 100, 500)), 42, seed=2)
    assert lengths[:4] != [20, 50, 100, 500]


def test_the_seed_workloads_prompts_have_their_law() -> None:
    drawn = draw_lengths(parse_law("seed_prompts"), 20_000, seed=1)
    seeds = [item.num_prompt_tokens for item in seed_workload(2000).items]
    for share in (0, 5, 25, 50, 75, 95, 100):
        assert np.percentile(drawn, share) == pytest.approx(np.percentile(seeds, share), rel=0.08)
