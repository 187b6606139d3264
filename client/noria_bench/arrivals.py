"""When requests arrive: times in seconds from 0, in order. A seed fixes what is drawn.

Nothing is rescaled afterwards: n requests at a rate come within about n / rate seconds, a Poisson stream now
sooner, now later, as its variance has it.
"""

from __future__ import annotations

import math

import numpy as np

# beyond, the gamma law cannot be drawn from in double precision
MIN_CV, MAX_CV = 0.001, 1000.0


def all_at_once(num: int) -> list[float]:
    return [0.0] * num


def constant_rate(num: int, rate: float) -> list[float]:
    """rate: requests per second."""
    _check("rate", rate)
    return [index / rate for index in range(num)]


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Independent arrivals, `rate` a second on average."""
    return gamma(num, rate, cv=1.0, seed=seed)


def gamma(num: int, rate: float, cv: float, seed: int) -> list[float]:
    """Gaps from a gamma law with a coefficient of variation of `cv`: above 1 is burstier than Poisson."""
    _check("rate", rate)
    _check("cv", cv)
    if not MIN_CV <= cv <= MAX_CV:
        raise ValueError(f"cv must be from {MIN_CV} to {MAX_CV}, not {cv}")
    shape = 1 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), num)
    return [float(time) for time in np.cumsum(gaps)]


def _check(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, not {value}")
