"""The chart of measured ratios over the spread of output lengths, beside what the lengths predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noria_bench.reporting.charts import Chart
from noria_bench.reporting.drawing import draw, frame, legend
from noria_bench.reporting.palette import INK, MUTED, Palette, Style
from noria_bench.reporting.ratio import RatioPoint
from noria_bench.reporting.text import label_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


def ratio_curve(key: str, points: Sequence[RatioPoint], palette: Palette) -> Chart | None:
    """None with fewer than two coefficients of variation."""
    if len({round(point.x, 3) for point in points}) < 2:
        return None
    ordered = sorted(points, key=lambda point: point.x)

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        base = label_name(ordered[0].base, 20)
        frame(axes, f"Ratio to {base} against length variance", "CV of the output lengths", f"tokens/s, times {base}")
        ideals = list({point.x: point.ideal for point in ordered}.items())
        axes.fill_between(
            [x for x, _ in ideals],
            [ideal.low for _, ideal in ideals],
            [ideal.high for _, ideal in ideals],
            color=MUTED.stand_in,
            alpha=0.22,
            linewidth=0,
        )
        axes.plot(
            [x for x, _ in ideals],
            [ideal.ratio for _, ideal in ideals],
            color=INK.stand_in,
            linestyle=(0, (4, 3)),
            linewidth=1.5,
            label="predicted, in-flight",
        )
        for label in dict.fromkeys(point.label for point in ordered):
            _draw_ratio(axes, [point for point in ordered if point.label == label], palette.style(label))
        axes.axhline(1, color=MUTED.stand_in, linewidth=1)
        axes.set_xlim(left=-0.05)
        axes.set_ylim(0, 1.1 * max(_top(point) for point in ordered))
        legend(canvas, axes)

    return Chart(
        "Ratio against length variance",
        "Filled: output tokens/s over those of the first label, with 95 % intervals over paired repeats. Hollow: "
        "the same of slot utilisation, which leaves out how long a step takes. Dashed: predicted from the lengths "
        "sent, E[longest of a batch] / E[length]; its band is where 95 % of the orders of arrival lie. A "
        "run's end, when nobody waits any more, draws measured ratios down.",
        draw(key, (6.2, 4.4), paint),
    )


def _draw_ratio(axes: Axes, points: Sequence[RatioPoint], style: Style) -> None:
    colour = style.colour.stand_in
    name = label_name(points[0].label, 24)
    ratios = [point.tokens for point in points]
    axes.errorbar(
        [point.x for point in points],
        [ratio.value for ratio in ratios],
        yerr=[
            [ratio.value - ratio.low if ratio.low is not None else 0 for ratio in ratios],
            [ratio.high - ratio.value if ratio.high is not None else 0 for ratio in ratios],
        ],
        color=colour,
        marker=style.marker,
        markersize=7,
        linestyle="",
        elinewidth=1.3,
        capsize=3,
        label=f"{name}, tokens/s",
    )
    slots = [(point.x, point.slots) for point in points if point.slots is not None]
    axes.plot(
        [x for x, _ in slots],
        [value for _, value in slots],
        color=colour,
        marker=style.marker,
        markersize=9,
        markerfacecolor="none",
        linestyle="",
        label=f"{name}, slots",
    )


def _top(point: RatioPoint) -> float:
    high = point.tokens.high if point.tokens.high is not None else point.tokens.value
    # an interval of two repeats may be as wide as it likes: the points are what is to be seen
    return max(min(high, 2 * point.tokens.value), point.ideal.high, point.slots or 0.0)
