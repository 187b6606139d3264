"""Charts over loads: throughput against latency, and goodput. And what all charts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria_bench.reporting.drawing import draw, frame, legend, scale_for
from noria_bench.reporting.figures import BY_KEY, Figure, Unit
from noria_bench.reporting.intervals import Estimate
from noria_bench.reporting.loaded import Family, Setting
from noria_bench.reporting.palette import MUTED, Palette, Style
from noria_bench.reporting.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PANEL = (5.2, 3.7)
MAX_NAME = 34


@dataclass(frozen=True, slots=True)
class Chart:
    """svg: an element, or an image as a data URI. caption: how to read it. is_wide: takes the page's width."""

    title: str
    caption: str
    svg: str
    is_wide: bool = False
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """The settings of one label of one result, by load."""

    name: str
    style: Style
    settings: tuple[Setting, ...]


def lines_of(family: Family, palette: Palette) -> list[Line]:
    return [
        Line(
            shortened(family.name(source, settings[0]), MAX_NAME),
            palette.style(label, place),
            tuple(settings),
        )
        for place, source in enumerate(family.sources)
        for label in dict.fromkeys(setting.label for setting in source.settings)
        if (settings := [setting for setting in source.settings if setting.label == label])
    ]


def throughput_against_latency(key: str, family: Family, palette: Palette, latency: Figure) -> Chart | None:
    """None where no setting has both."""
    throughput = BY_KEY["output_tokens_per_s"]
    lines = lines_of(family, palette)
    factor = 1000 if latency.unit is Unit.MILLISECONDS else 1
    points = [
        [
            (setting, x.value, factor * y.value)
            for setting in line.settings
            if (x := setting.estimate(throughput)) is not None and (y := setting.estimate(latency)) is not None
        ]
        for line in lines
    ]
    known = [point for of_line in points for point in of_line]
    if not known:
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        y_label = f"{latency.title}, {latency.unit.value}"
        frame(axes, f"Throughput against {latency.title}", "useful output tokens/s", y_label)
        for line, of_line in zip(lines, points, strict=True):
            _draw_points(axes, line, of_line)
        scale_for(axes, "x", [x for _, x, _ in known])
        scale_for(axes, "y", [y for _, _, y in known])
        _name_loads(axes, [ends for of_line in points for ends in (of_line[:1], of_line[-1:])])
        legend(canvas, axes)

    return Chart(
        f"Throughput against {latency.title}",
        "Right and down is better. A point is a load, the mean of its valid runs; a line follows the load. "
        "Crosses are loads without a valid run.",
        draw(key, PANEL, paint),
    )


def _draw_points(axes: Axes, line: Line, points: Sequence[tuple[Setting, float, float]]) -> None:
    colour = line.style.colour.stand_in
    valid = [point for point in points if point[0].is_valid]
    axes.plot(
        [x for _, x, _ in valid],
        [y for _, _, y in valid],
        color=colour,
        linestyle=line.style.line,
        marker=line.style.marker,
        markersize=6.5,
        markerfacecolor=line.style.face,
        linewidth=1.8,
        label=line.name,
    )
    invalid = [(x, y) for setting, x, y in points if not setting.is_valid]
    style = {"color": colour, "linestyle": "", "marker": "x", "markersize": 8}
    axes.plot([x for x, _ in invalid], [y for _, y in invalid], **style)  # type: ignore[arg-type]


def _name_loads(axes: Axes, ends: Sequence[Sequence[tuple[Setting, float, float]]]) -> None:
    """Beside the ends of lines, but not on top of each other."""
    named: list[tuple[float, float]] = []
    for setting, x, y in (point for of_line in ends for point in of_line):
        place = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        is_free = all(abs(place[0] - other[0]) > 0.12 or abs(place[1] - other[1]) > 0.07 for other in named)
        if setting.load.value and is_free:
            named.append((float(place[0]), float(place[1])))
            style = {"textcoords": "offset points", "fontsize": 8.5, "color": MUTED.stand_in}
            axes.annotate(str(setting.load), (x, y), xytext=(5, 5), **style)  # type: ignore[arg-type]


def goodput_against_load(key: str, family: Family, palette: Palette) -> Chart | None:
    """None without objectives, or without loads that have a number."""
    goodput = BY_KEY["good_requests_per_s"]
    lines = lines_of(family, palette)
    points = [
        [
            (setting, setting.load.value, estimate)
            for setting in line.settings
            if setting.load.value and (estimate := setting.estimate(goodput)) is not None
        ]
        for line in lines
    ]
    known = [point for of_line in points for point in of_line]
    if not known:
        return None
    is_open = all(setting.load.rate for setting, _, _ in known)
    limit = 1.12 * max(x for _, x, _ in known)

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        x_label = "offered rate, requests/s" if is_open else "requests under way"
        frame(axes, "Goodput against load", x_label, "good requests/s")
        for line, of_line in zip(lines, points, strict=True):
            _draw_with_intervals(axes, line, [(x, estimate) for _, x, estimate in of_line])
        if is_open:
            axes.plot([0, limit], [0, limit], color=MUTED.stand_in, linewidth=1.2, linestyle=":", label="all good")
        axes.set_xlim(0, limit)
        highest = [estimate.high if estimate.high is not None else estimate.value for _, _, estimate in known]
        axes.set_ylim(0, 1.12 * max(*highest, max(estimate.value for _, _, estimate in known), 1e-9))
        legend(canvas, axes)

    return Chart(
        "Goodput against load",
        "Requests that met all objectives of their class, a second; rejected, late, failed and aborted ones count as "
        "not met. Whiskers: 95 % interval over repeats.",
        draw(key, PANEL, paint),
    )


def _draw_with_intervals(axes: Axes, line: Line, points: Sequence[tuple[float, Estimate]]) -> None:
    below = [estimate.value - max(estimate.low, 0) if estimate.low is not None else 0 for _, estimate in points]
    above = [estimate.high - estimate.value if estimate.high is not None else 0 for _, estimate in points]
    axes.errorbar(
        [x for x, _ in points],
        [estimate.value for _, estimate in points],
        yerr=[below, above],
        color=line.style.colour.stand_in,
        linestyle=line.style.line,
        marker=line.style.marker,
        markersize=6.5,
        markerfacecolor=line.style.face,
        linewidth=1.8,
        elinewidth=1.1,
        capsize=3,
        label=line.name,
    )
