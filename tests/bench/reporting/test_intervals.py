"""Intervals against quantiles and examples that are known, and against their own promise: 95 % of them hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noria_bench.reporting.intervals import Estimate, bootstrap, mean_of, paired_ratio, t_975, unpaired_ratio


def student_cdf(degrees, t):
    """By the trapezoidal rule over its density."""
    x = np.linspace(0, t, 20_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    return 0.5 + float(np.trapz(scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x))


@pytest.mark.parametrize("degrees", [*range(1, 34), 60, 120, 1000])
def test_quantiles_of_students_distribution(degrees):
    assert student_cdf(degrees, t_975(degrees)) == pytest.approx(0.975, abs=2e-5)


def test_no_degrees_of_freedom():
    with pytest.raises(ValueError, match="degrees of freedom must be at least 1, not 0"):
        t_975(0)


def test_mean_by_hand():
    # standard deviation 1, three values: 4.3027 / sqrt(3)
    estimate = mean_of([1.0, 2.0, 3.0])
    assert (estimate.value, estimate.low) == (2.0, pytest.approx(2 - 2.48417, abs=1e-4))
    assert estimate.high == pytest.approx(2 + 2.48417, abs=1e-4)
    assert mean_of([7.0]) == Estimate(7.0, None, None)


def test_paired_ratio_by_hand():
    # each pair's ratio is 2, however different the pairs are
    same = paired_ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))
    # logarithms -ln 2 and +ln 2: their mean is 0, their standard error ln 2
    spread = paired_ratio([2.0, 1.0], [1.0, 2.0])
    assert spread.value == pytest.approx(1.0)
    assert spread.high == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-4)
    assert paired_ratio([2.0], [3.0]).low is None


def test_welch_by_hand():
    # logarithms 0, 2 and 5, 5, 5: variance of the means 1 and 0, so one degree of freedom
    estimate = unpaired_ratio([1.0, math.e**2], [math.e**5] * 3)
    assert math.log(estimate.value) == pytest.approx(4)
    assert math.log(estimate.low) == pytest.approx(4 - 12.7062, abs=1e-4)
    alike = unpaired_ratio([2.0, 2.0], [4.0, 4.0])
    assert (alike.value, alike.low, alike.high) == pytest.approx((2.0, 2.0, 2.0))
    assert unpaired_ratio([1.0], [2.0, 3.0]).low is None


def test_bootstrap_of_a_mean_is_about_its_standard_error():
    values = np.random.default_rng(1).normal(10, 2, 400)
    estimate = bootstrap(lambda rng: float(rng.choice(values, 400).mean()), float(values.mean()), 2000, seed=0)
    half = 1.96 * float(values.std()) / 20
    assert estimate.low == pytest.approx(estimate.value - half, abs=0.02)
    assert estimate.high == pytest.approx(estimate.value + half, abs=0.02)


def test_bootstrap_of_what_has_no_statistic():
    assert bootstrap(lambda rng: None, 3.0, 10, seed=0) == Estimate(3.0)


def test_intervals_of_means_hold_as_often_as_they_say():
    rng = np.random.default_rng(7)
    num_held = sum(one.low <= 5 <= one.high for one in (mean_of(rng.normal(5, 1, 4).tolist()) for _ in range(2000)))
    assert 0.935 < num_held / 2000 < 0.965
