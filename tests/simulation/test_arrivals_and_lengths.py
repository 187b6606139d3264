"""Length laws, arrivals and traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from noria.errors import ConfigError
from noria.simulation.requests import distinct_prompt, make_requests, with_shared_prefix
from noria.simulation.trace import read_trace_requests
from noria_bench.arrivals import all_at_once, constant_rate, gamma, poisson
from noria_bench.lengths import (
    ConstantLength,
    EmpiricalLength,
    ExponentialLength,
    LengthLaw,
    LognormalLength,
    UniformLength,
    draw_lengths,
)


@pytest.mark.parametrize(
    ("law", "mean", "cv"),
    [
        (ConstantLength(128), 128, 0),
        (UniformLength(1, 128), 64.5, 0.573),
        # the means of the exponential law of mean 128 below its caps, 128 - cap / (e^(cap / 128) - 1), rounded up
        (ExponentialLength(128, cap=128), 54, 0.66),
        (ExponentialLength(128, cap=512), 118, 0.89),
        (LognormalLength(100, cv=0.5), 100.5, 0.5),
        (EmpiricalLength([1, 3]), 2, 0.5),
    ],
)
def test_laws_have_their_mean_and_variation(law: LengthLaw, mean: float, cv: float) -> None:
    lengths = draw_lengths(law, 20_000, seed=1)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.03)
    assert np.std(lengths) / np.mean(lengths) == pytest.approx(cv, abs=0.03)
    assert min(lengths) >= 1
    assert lengths == draw_lengths(law, 20_000, seed=1)


def test_lengths_above_the_cap_are_drawn_again_and_do_not_pile_up_at_it() -> None:
    lengths = draw_lengths(ExponentialLength(128, cap=32), 20_000, seed=1)
    assert max(lengths) == 32
    assert lengths.count(32) < 20_000 / 32
    with pytest.raises(ValueError, match="hardly any"):
        draw_lengths(LognormalLength(1e6, cv=0.01, cap=10), 5, seed=0)


def test_arrivals_come_at_their_rate_and_burstiness() -> None:
    assert all_at_once(2) == [0, 0]
    assert constant_rate(3, rate=4.0) == [0, 0.25, 0.5]
    for times, cv in ((poisson(20_000, 2.0, seed=1), 1.0), (gamma(20_000, 2.0, cv=3.0, seed=1), 3.0)):
        gaps = np.diff(times)
        assert np.mean(gaps) == pytest.approx(0.5, rel=0.06)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.06)
    assert poisson(9, 2.0, seed=1) == poisson(9, 2.0, seed=1) != poisson(9, 2.0, seed=2)


def test_prompts_are_unlike_each_other_but_for_the_prefix_that_a_share_of_them_has() -> None:
    assert distinct_prompt(3, 4) != distinct_prompt(4, 4)
    requests = make_requests(all_at_once(2000), [50] * 1999 + [10], [1] * 2000)
    shared = [one.prompt_token_ids for one in with_shared_prefix(requests, 20, share=0.25, seed=0)]
    prompts = [prompt for prompt in shared if prompt is not None]
    assert len(prompts) == pytest.approx(500, rel=0.1)
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[:21] for prompt in prompts}) == len(prompts)
    (short,) = (one.prompt_token_ids for one in with_shared_prefix(requests[-1:], 20, share=1.0, seed=0))
    assert short == (0,) * 9 + (1,)


def azure(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines)))
    return path


def test_a_trace_is_read_at_a_speed_and_up_to_a_limit(tmp_path: Path) -> None:
    path = azure(tmp_path, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9305900,3960,0")
    requests = read_trace_requests(path, speed=2.0)
    assert requests == make_requests([0, 2.125], [374, 3960], [44, 1])
    assert read_trace_requests(path, speed=2.0, limit=1) == requests[:1]
    with pytest.raises(ConfigError, match="speed must be above 0"):
        read_trace_requests(path, speed=0.0)


def test_prompts_share_the_blocks_that_a_trace_says_they_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [[700, [3, 4]], [600, [3, 5]], [600, [3]], [600, [3]], [9, []]]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": hash_ids})
            for length, hash_ids in lines
        )
    )
    one, two, three, four, other = (request.prompt_token_ids or () for request in read_trace_requests(path))
    assert [len(prompt) for prompt in (one, two, three, four, other)] == [700, 600, 600, 600, 0]
    assert one[:512] == two[:512] == three[:512] == four[:512]
    # what no hash covers is shared with nobody
    assert len({one[512], two[512], three[512], four[512]}) == 4


def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.csv, line 2: ContextTokens must be a whole number of at least 1"):
        read_trace_requests(azure(tmp_path, "2023-11-16 18:15:46,0,1"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace_requests(tmp_path / "none.csv")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "output_tokens": 3}')
    with pytest.raises(ConfigError, match="must say how long prompts are and when they came, as azure, mooncake do"):
        read_trace_requests(prompts)
