"""What a study is made of: a table of points, and what a picture of them would show. Draws and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

Value = TypeVar("Value")


class Mark(str, Enum):
    """How a series is drawn. level: one y across the whole panel. steps: y holds until the next x. bars: a group at
    each x, one bar for each series of the panel."""

    LINE = "line"
    POINTS = "points"
    BARS = "bars"
    STEPS = "steps"
    LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Series:
    """label: empty leaves it out of the legend. colour: its number in the palette; one thing keeps its colour in all
    panels. x: numbers or, for bars, names. dashed: for what is predicted, or a reference."""

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    colour: int = 0
    mark: Mark = Mark.LINE
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """x_label, y_label: with their units. x_scale, y_scale: linear, log or log2. has_end_labels: lines bear their
    labels at their ends, not in the legend."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_scale: str = "linear"
    y_scale: str = "linear"
    has_end_labels: bool = False


@dataclass(frozen=True, slots=True)
class Study:
    """setting: what is simulated, so that somebody else could. findings: sentences with numbers from the points.
    points: instances of one frozen dataclass, the rows of the table. num_columns: of panels in the picture."""

    name: str
    title: str
    setting: str
    findings: tuple[str, ...]
    points: Sequence[Any]
    panels: tuple[Panel, ...]
    num_columns: int = 2


def known(value: Value | None) -> Value:
    """What a summary has where requests have finished. Raises ValueError if none has."""
    if value is None:
        raise ValueError("no request of the study has finished")
    return value
