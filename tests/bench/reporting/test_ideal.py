"""What lengths predict, against laws whose ratio is known, and by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from noria_bench.lengths import ExponentialLength, UniformLength, draw_lengths
from noria_bench.reporting.ideal import ideal_of, ideal_of_setting
from noria_bench.reporting.loaded import load_sources
from support.bench_results import write_bench_result


def test_equal_lengths_have_nothing_to_gain():
    ideal = ideal_of([128] * 40, 8)
    assert (ideal.ratio, ideal.low, ideal.high, ideal.cv, ideal.closed_utilisation) == (1, 1, 1, 0, 1)


def test_by_hand():
    # of four requests two make a batch: E[max] over the six pairs, each as likely as another
    lengths = [1, 2, 3, 10]
    expected = np.mean([max(pair) for pair in combinations(lengths, 2)]) / 4
    assert ideal_of(lengths, 2).ratio == pytest.approx(expected, rel=0.03)


# E[max of B] / E[L] of the law, as FIELD's literature has it
@pytest.mark.parametrize(
    ("law", "num_slots", "ratio", "cv"),
    [
        (UniformLength(1, 128), 8, 1.77, 0.58),
        (UniformLength(1, 128), 32, 1.94, 0.58),
        (ExponentialLength(128, 512), 16, 2.99, 0.89),
    ],
    ids=["uniform-8", "uniform-32", "exponential-16"],
)
def test_known_laws(law, num_slots, ratio, cv):
    ideal = ideal_of(draw_lengths(law, 20_000, seed=3), num_slots)
    assert ideal.ratio == pytest.approx(ratio, rel=0.02)
    assert ideal.cv == pytest.approx(cv, abs=0.02)
    assert ideal.low < ideal.ratio < ideal.high


def test_fewer_requests_than_slots_make_one_batch():
    ideal = ideal_of([10, 20, 30], 8)
    assert (ideal.num_slots, ideal.ratio) == (3, 30 / 20)


def test_nothing_was_answered():
    assert ideal_of([], 8) is None
    assert ideal_of([0, 0], 8) is None


def test_a_closed_batch_uses_what_the_lengths_allow(tmp_path):
    """The simulated static run has its own order; it must lie where 95 % of the orders do."""
    write_bench_result(tmp_path / "one", modes=["static"], num_requests=64)
    [source] = load_sources([tmp_path / "one"])
    [setting] = source.settings
    ideal = ideal_of_setting(source, setting)
    assert 1 / ideal.high < setting.runs[0].summary.server.slot_utilisation < 1 / ideal.low
