"""Laws by which numbers of tokens are drawn. Every law gives whole numbers of at least 1; a seed fixes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


class LengthLaw(Protocol):
    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        """`num` independent lengths, [num]."""


def draw_lengths(law: LengthLaw, num: int, seed: int) -> list[int]:
    """`num` lengths; the same arguments give the same ones."""
    return [int(length) for length in law.draw(num, np.random.default_rng(seed))]


@dataclass(frozen=True, slots=True)
class ConstantLength:
    length: int

    def __post_init__(self) -> None:
        _check("length", self.length)

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        return np.full(num, self.length, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check("low", self.low)
        _check("high", self.high, self.low)

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        return rng.integers(self.low, self.high, size=num, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class ExponentialLength:
    """mean: of the law without its cap. Draws above the cap are drawn again, so that none piles up at it."""

    mean: float
    cap: int

    def __post_init__(self) -> None:
        _check("mean", self.mean)
        _check("cap", self.cap)

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        return _below(self.cap, num, lambda missing: rng.exponential(self.mean, missing))


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """mean, cv: mean and coefficient of variation, before the cap. Draws above the cap are drawn again."""

    mean: float
    cv: float
    cap: int = 2**20

    def __post_init__(self) -> None:
        _check("mean", self.mean)
        _check("cv", self.cv, 0)
        _check("cap", self.cap)

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        variance = math.log1p(self.cv**2)
        location = math.log(self.mean) - variance / 2
        return _below(self.cap, num, lambda missing: rng.lognormal(location, math.sqrt(variance), missing))


@dataclass(frozen=True, slots=True)
class ClampedLognormalLength:
    """median, sigma: of the law before it is kept within low to high, where what lies beyond piles up."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check("median", self.median)
        _check("sigma", self.sigma, 0)
        _check("low", self.low)
        _check("high", self.high, self.low)

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        drawn = np.rint(rng.lognormal(math.log(self.median), self.sigma, num))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class MixedLength:
    """Each of the lengths equally often, or once more than another where the number does not go up; shuffled."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths must not be empty")
        _check("lengths", min(self.lengths))

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        return rng.permutation(np.resize(np.asarray(self.lengths, dtype=np.int64), num))


@dataclass(frozen=True, slots=True)
class EmpiricalLength:
    """Draws from a list, with replacement."""

    lengths: Sequence[int]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths must not be empty")
        _check("lengths", min(self.lengths))

    def draw(self, num: int, rng: np.random.Generator) -> Lengths:
        return rng.choice(np.asarray(self.lengths, dtype=np.int64), size=num)


def _below(cap: int, num: int, draw: Callable[[int], NDArray[np.float64]]) -> Lengths:
    """`num` draws, rounded up, of those that are at most `cap`. Raises ValueError where hardly any is."""
    kept = np.empty(0, dtype=np.int64)
    # an acceptance of 1 in 1,000 still ends well within it
    for _ in range(10_000):
        drawn = np.ceil(draw(max(num - len(kept), 1))).astype(np.int64)
        kept = np.concatenate([kept, drawn[drawn <= cap]])
        if len(kept) >= num:
            return np.maximum(kept[:num], 1)
    raise ValueError(f"cap must leave room for the lengths to draw; hardly any is at most {cap}")


def _check(name: str, value: float, minimum: float = 1) -> None:
    if not minimum <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least {minimum}, not {value}")
