"""Finds what steps cost from the traces of engines at work, with all that serving costs beside them.

A recorded step counts from the moment when the scheduler was asked; what the engine's thread does between two steps
(text, handing on) counts too. Machines that serve are disturbed now and then: the formula keeps the sum of all recorded
times, so that over many steps the disturbances are in it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from noria.errors import ConfigError
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.fit import fit_cost_model
from noria.simulation.step_shape import StepSample, StepShape
from noria.timeline.recorded_trace import RecordedStep, RowKind


def costs_of_samples(samples: Sequence[StepSample]) -> MeasuredCostModel:
    """Fitted so that the sum of all is kept. Raises ConfigError where they are too few or too much alike."""
    try:
        fitted = fit_cost_model(samples)
    except ValueError as error:
        raise ConfigError(f"the recorded steps do not suffice to tell what a step costs: {error}") from None
    return fitted.scaled(pace(fitted, samples))


def pace(cost_model: MeasuredCostModel, samples: Sequence[StepSample]) -> float:
    """How many times as long as by the formula the samples took, all together."""
    return sum(sample.seconds for sample in samples) / sum(cost_model.seconds_of(sample.shape) for sample in samples)


def step_samples(steps: Sequence[RecordedStep]) -> list[StepSample]:
    """Each step with the typical time between two added: what was between it and the next may have been a pause."""
    gaps = [later.started_s - earlier.ended_s for earlier, later in pairwise(steps) if earlier.num_running]
    gap_s = max(0.0, median(gaps)) if gaps else 0.0
    return [
        StepSample(shape_of_recorded(step), step.ended_s - step.started_s + gap_s)
        for step in steps
        if step.ended_s > step.started_s
    ]


def shape_of_recorded(step: RecordedStep) -> StepShape:
    rows = ((row.num_tokens, row.num_computed_tokens, row.kind is RowKind.DRAW) for row in step.rows)
    return StepShape.of_rows(rows, step.num_swapped_in_blocks + step.num_swapped_out_blocks)
