"""Colours, in light and in dark: one for each label, the same in every chart.

A chart is drawn once, in stand-in colours, which `drawing` replaces by the names of these variables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """name: of its CSS variable. stand_in: what it is drawn in, like no other; the rest as #rrggbb."""

    name: str
    stand_in: str
    light: str
    dark: str


def _colour(number: int, name: str, light: str, dark: str) -> Colour:
    return Colour(name, f"#01f0{number:02x}", light, dark)


INK = _colour(1, "ink", "#1d2430", "#e8ebf0")
MUTED = _colour(2, "muted", "#596272", "#a4adbb")
GRID = _colour(3, "grid", "#dde1e7", "#363d49")
SURFACE = _colour(4, "surface", "#ffffff", "#171b22")
ALARM = _colour(5, "alarm", "#b3261e", "#ff8a80")
# after Okabe and Ito 2008, whose hues are told apart with any kind of colour vision; at least 3:1 against the surface
_OF_MODES = {
    "static": _colour(16, "static", "#d55e00", "#ff9d5c"),
    "dynamic": _colour(17, "dynamic", "#00825f", "#3fd1a5"),
    "inflight": _colour(18, "inflight", "#0072b2", "#62bdf2"),
}
_OF_OTHERS = (
    _colour(32, "other-1", "#a2508a", "#e79dcd"),
    _colour(33, "other-2", "#806600", "#e2c84c"),
    _colour(34, "other-3", "#5b4fc4", "#b0a6ff"),
    _colour(35, "other-4", "#8a4b2a", "#d9a588"),
    _colour(36, "other-5", "#5c6470", "#c3cad4"),
)
ALL = (INK, MUTED, GRID, SURFACE, ALARM, *_OF_MODES.values(), *_OF_OTHERS)
_MARKERS = {"static": "s", "dynamic": "^", "inflight": "o"}
_MARKERS_OF_OTHERS = ("D", "v", "P", "X", "h")
# one a result, where several share a chart
_LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))


@dataclass(frozen=True, slots=True)
class Style:
    """Of a label's marks: told by shape and line as well as by colour. is_hollow: of every result but the first."""

    colour: Colour
    marker: str
    line: str | tuple[float, tuple[float, ...]]
    is_hollow: bool

    @property
    def face(self) -> str:
        return SURFACE.stand_in if self.is_hollow else self.colour.stand_in


class Palette:
    """Modes have their own colours; other labels take the rest in the order in which they come."""

    def __init__(self, labels: Iterable[str]) -> None:
        others = [label for label in dict.fromkeys(labels) if label not in _OF_MODES]
        self._places = {label: place % len(_OF_OTHERS) for place, label in enumerate(others)}

    def colour(self, label: str) -> Colour:
        return _OF_MODES[label] if label in _OF_MODES else _OF_OTHERS[self._places[label]]

    def style(self, label: str, source_index: int = 0) -> Style:
        marker = _MARKERS[label] if label in _MARKERS else _MARKERS_OF_OTHERS[self._places[label]]
        return Style(self.colour(label), marker, _LINES[source_index % len(_LINES)], is_hollow=source_index > 0)


def css_variables(is_dark: bool) -> str:
    return " ".join(f"--{colour.name}: {colour.dark if is_dark else colour.light};" for colour in ALL)
