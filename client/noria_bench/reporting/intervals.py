"""95 % intervals: of a mean, of a ratio over repeats, and of anything that can be drawn again.

Repeats are few, so theirs are Student's; ratios are averaged as logarithms, for which twice and half are equally far
from one. Knows nothing of runs and requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# the 0.975 quantile of Student's t distribution, from one degree of freedom on
_T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z_975 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """low, high: bounds of a 95 % interval; None where there is nothing to derive one from."""

    value: float
    low: float | None = None
    high: float | None = None


def t_975(degrees: int) -> float:
    """Half the width of a 95 % interval, in standard errors."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    # Cornish and Fisher's expansion: within 0.0001 from 31 on
    z = _Z_975
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_of(values: Sequence[float]) -> Estimate:
    """Student's interval; without bounds for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean)
    half = t_975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> Estimate:
    """Geometric mean of other / base, pair by pair, all above 0; Student's interval of the logarithms."""
    return _exponential(mean_of(np.log(np.asarray(other) / np.asarray(base)).tolist()))


def unpaired_ratio(base: Sequence[float], other: Sequence[float]) -> Estimate:
    """Ratio of the geometric means, all above 0; Welch's interval (Welch 1947) where both have two values or more.

    Degrees of freedom are rounded down, which widens it.
    """
    logs = [np.log(np.asarray(values)) for values in (base, other)]
    difference = float(np.mean(logs[1]) - np.mean(logs[0]))
    if min(len(base), len(other)) < 2:
        return Estimate(math.exp(difference))
    errors = [float(np.var(values, ddof=1)) / len(values) for values in logs]
    if sum(errors) == 0:
        return _exponential(Estimate(difference, difference, difference))
    degrees = sum(errors) ** 2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, logs, strict=True))
    half = t_975(max(1, math.floor(degrees))) * math.sqrt(sum(errors))
    return _exponential(Estimate(difference, difference - half, difference + half))


def bootstrap(draw: Callable[[np.random.Generator], float | None], value: float, num_draws: int, seed: int) -> Estimate:
    """Efron's percentile interval around `value`: where 95 % of what `draw` gives lie.

    draw: the statistic of a resample, None if that one has none.
    """
    rng = np.random.default_rng(seed)
    drawn = [one for one in (draw(rng) for _ in range(num_draws)) if one is not None]
    if not drawn:
        return Estimate(value)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _exponential(estimate: Estimate) -> Estimate:
    if estimate.low is None or estimate.high is None:
        return Estimate(math.exp(estimate.value))
    return Estimate(math.exp(estimate.value), math.exp(estimate.low), math.exp(estimate.high))
