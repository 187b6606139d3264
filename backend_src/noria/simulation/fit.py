"""Finds a MeasuredCostModel's coefficients from measured steps, on machines where others disturb the measurement.

Knows nothing of how steps are run or timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.step_shape import StepSample, StepShape

MAX_TABLE_ENTRIES = 12
NUM_REWEIGHTINGS = 10
# beyond so many typical deviations a sample pulls no harder (Huber 1964, 95 % efficient under normal noise)
HUBER_LIMIT = 1.345

Vector = NDArray[np.float64]

_TERMS: dict[str, Callable[[StepShape], int]] = {
    "per_decode_row_s": lambda shape: shape.num_decode_rows,
    "per_decode_context_s": lambda shape: shape.num_decode_context,
    "per_prefill_pair_s": lambda shape: shape.num_prefill_pairs,
    "per_sampled_row_s": lambda shape: shape.num_sampled_rows,
    "per_block_copy_s": lambda shape: shape.num_block_copies,
}


def fit_cost_model(samples: Sequence[StepSample]) -> MeasuredCostModel:
    """The model with the least relative error on `samples`, no coefficient below 0.

    Samples of equal shape are one observation, their median: repeat each shape a few times. Observations that stay far
    off count less (iteratively reweighted least squares). The linear table's seconds are on top of the smallest step's,
    which constant_s holds. What the samples never vary is found as 0, or as part of what varies with it.
    Raises ValueError when there are fewer observations than 2.
    """
    shapes, seconds = _medians(samples)
    if len(shapes) < 2:
        raise ValueError(f"samples must hold at least 2 different shapes, not {len(shapes)}")
    knots = _knots([shape.num_tokens for shape in shapes])
    # each observation is divided by its seconds, so that residuals are relative
    design = _design(shapes, knots) / seconds[:, None]
    solution = _robust_non_negative(design, np.ones(len(seconds)))
    errors = np.abs(design @ solution - 1)
    constant_s, *rest = (float(value) for value in solution)
    num_lines = len(knots) - 1
    table = [(knots[0], 0.0)]
    for (start, end), slope in zip(pairwise(knots), rest[:num_lines], strict=True):
        table.append((end, table[-1][1] + slope * (end - start)))
    terms: dict[str, Any] = dict(zip(_TERMS, rest[num_lines:], strict=True))
    return MeasuredCostModel(tuple(table), constant_s, **terms, median_relative_error=float(np.median(errors)))


def non_negative_least_squares(design: Vector, target: Vector) -> Vector:
    """The x >= 0 that minimises |design @ x - target|. design: [rows, columns], target: [rows].

    Lawson and Hanson 1974, chapter 23: columns enter one by one while that lowers the error, and leave when they would
    turn negative.
    """
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    design = design / scale
    solution = np.zeros(design.shape[1])
    is_free = np.zeros(design.shape[1], dtype=bool)
    tolerance = 1e-10 * float(np.linalg.norm(target))
    # in exact arithmetic it ends by itself; the bound is for columns that rounding makes enter and leave for ever
    for _ in range(3 * design.shape[1]):
        gradient = np.where(is_free, 0.0, design.T @ (target - design @ solution))
        if gradient.max(initial=0.0) <= tolerance:
            break
        is_free[gradient.argmax()] = True
        solution = _leave_negative(design, target, solution, is_free)
    return solution / scale


def _leave_negative(design: Vector, target: Vector, solution: Vector, is_free: NDArray[np.bool_]) -> Vector:
    """The least squares over the free columns, less those (by changing `is_free`) that it would turn negative."""
    while True:
        best = np.zeros_like(solution)
        best[is_free] = np.linalg.lstsq(design[:, is_free], target, rcond=None)[0]
        is_negative = is_free & (best <= 0)
        if not is_negative.any():
            return best
        gap = solution[is_negative] - best[is_negative]
        step = float(np.min(solution[is_negative] / np.where(gap > 0, gap, 1.0)))
        solution = solution + step * (best - solution)
        is_free &= solution > 1e-14
        solution[~is_free] = 0.0


def _robust_non_negative(design: Vector, target: Vector) -> Vector:
    solution = non_negative_least_squares(design, target)
    for _ in range(NUM_REWEIGHTINGS):
        residuals = np.abs(design @ solution - target)
        # 1.4826 makes the median absolute deviation of normal noise its standard deviation
        limit = HUBER_LIMIT * max(1.4826 * float(np.median(residuals)), 1e-9)
        weights = np.sqrt(limit / np.maximum(residuals, limit))
        solution = non_negative_least_squares(design * weights[:, None], target * weights)
    return solution


def _medians(samples: Sequence[StepSample]) -> tuple[list[StepShape], Vector]:
    by_shape: dict[StepShape, list[float]] = {}
    for sample in samples:
        by_shape.setdefault(sample.shape, []).append(sample.seconds)
    return list(by_shape), np.array([np.median(seconds) for seconds in by_shape.values()])


def _knots(num_tokens: Sequence[int]) -> list[int]:
    """Where the linear table has entries: all numbers of tokens seen, or as many of them at even distances in log."""
    # a step that only copies blocks has none
    seen = sorted({max(1, number) for number in num_tokens})
    if len(seen) <= MAX_TABLE_ENTRIES:
        return seen
    wanted = np.geomspace(seen[0], seen[-1], MAX_TABLE_ENTRIES)
    return sorted({min(seen, key=lambda number: abs(number - want)) for want in wanted})


def _design(shapes: Sequence[StepShape], knots: Sequence[int]) -> Vector:
    """[shapes, 1 + lines of the table + terms]: what each coefficient is multiplied by."""
    num_tokens = np.array([shape.num_tokens for shape in shapes], dtype=float)
    # a line's share of num_tokens, so that its coefficient is its slope
    lines = [np.clip(num_tokens, start, end) - start for start, end in pairwise(knots)]
    terms = [np.array([count(shape) for shape in shapes], dtype=float) for count in _TERMS.values()]
    return np.stack([np.ones(len(shapes)), *lines, *terms], axis=1)
