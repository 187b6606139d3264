"""Charts of single requests: how their latencies are distributed, and who was served when.

They need the requests' records, which a result may have been kept without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from noria_bench.records import Outcome, RequestRecord
from noria_bench.reporting.charts import MAX_NAME, PANEL, Chart
from noria_bench.reporting.drawing import draw, frame, legend, scale_for
from noria_bench.reporting.figures import LATENCIES
from noria_bench.reporting.loaded import Family, Load, Setting, Source
from noria_bench.reporting.palette import ALARM, INK, Palette, Style
from noria_bench.reporting.text import plain, shortened
from noria_bench.results import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDE = 10.6
_MAX_STEPS = 150
_MAX_BARS = 64


@dataclass(frozen=True, slots=True)
class Shown:
    """A label's setting under the load shown. run: of its counted runs the first. run_name: unique in the chart."""

    name: str
    run_name: str
    style: Style
    source: Source
    setting: Setting

    @property
    def run(self) -> Run:
        return self.setting.counted[0]


def shown_under(family: Family, load: Load, palette: Palette) -> list[Shown]:
    found = []
    for source, setting in family.at(load):
        name = shortened(family.name(source, setting), MAX_NAME)
        style = palette.style(setting.label, family.sources.index(source))
        run_name = plain(setting.counted[0].name, 60)
        if len(family.sources) > 1:
            run_name = f"{source.name}: {run_name}"
        found.append(Shown(name, run_name, style, source, setting))
    return found


def distribution(key: str, latency: str, unit: str, shown: Sequence[Shown], load: Load) -> Chart | None:
    """Empirical distribution function. latency: of LATENCIES. unit: s or ms."""
    factor = 1000 if unit == "ms" else 1
    name = {"ttft": "TTFT", "tpot": "TPOT"}[latency]
    curves = []
    for one in shown:
        records = [record for run in one.setting.counted for record in one.source.records(run)]
        judged = [record for record in records if record.outcome is not Outcome.CANCELLED]
        values = [factor * value for record in judged if (value := _latency(record, latency)) is not None]
        # one that cannot have the latency, such as the tpot of one token, is of neither kind
        num = len(values) + sum(not record.has_succeeded for record in judged)
        if values:
            curves.append((one, np.sort(values), num))
    if not curves:
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        frame(axes, f"{name}, {load}", f"{name}, {unit}", "share of requests, %")
        for one, values, num in curves:
            places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_STEPS)).round().astype(int))
            axes.step(
                [values[0], *values[places]],
                [0, *(100 * (places + 1) / num)],
                where="post",
                color=one.style.colour.stand_in,
                linestyle=one.style.line,
                linewidth=1.8,
                label=one.name,
            )
        scale_for(axes, "x", [float(value) for _, values, _ in curves for value in values])
        axes.set_ylim(0, 103)
        axes.set_yticks(range(0, 101, 25))
        legend(canvas, axes)

    return Chart(
        f"{name} distribution",
        "Requests that did not finish count as infinitely late: their curve ends below 100 %. Those cancelled on "
        "purpose are left out.",
        draw(key, PANEL, paint),
    )


def _latency(record: RequestRecord, latency: str) -> float | None:
    if not record.has_succeeded:
        return None
    return next((value for value in LATENCIES[latency](record) if value is not None), None)


def requests_over_time(key: str, shown: Sequence[Shown], load: Load) -> Chart | None:
    """A bar for each request of one run of each label: waiting, then answering."""
    panels_of = [(one, records) for one in shown if (records := _first_requests(one))]
    if not panels_of:
        return None
    heights = [0.075 * len(records) + 0.5 for _, records in panels_of]

    def paint(canvas: Canvas) -> None:
        panels = canvas.subplots(len(panels_of), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (one, records) in zip(panels, panels_of, strict=True):
            frame(axes, one.name, "", "request")
            axes.grid(visible=False)
            _draw_requests(axes, one.style, records)
        panels[-1].set_xlabel("seconds since the first request after warm-up")
        panels[-1].set_xlim(left=0)
        _request_legend(canvas)

    num = max(len(records) for _, records in panels_of)
    runs = ", ".join(one.run_name for one, _ in panels_of)
    return Chart(
        f"Requests over time, {load}",
        f"The first {num} requests after warm-up, in the order in which they were sent, in the runs {runs}. A gap in "
        "the colour is a gap in the answer of a twentieth of the time shown or more.",
        draw(key, (WIDE, sum(heights) + 0.8), paint),
        is_wide=True,
    )


def _first_requests(one: Shown) -> list[RequestRecord]:
    return sorted(one.source.records(one.run), key=lambda record: (record.sent_s, record.index))[:_MAX_BARS]


def _draw_requests(axes: Axes, style: Style, records: Sequence[RequestRecord]) -> None:
    origin = records[0].sent_s
    span = max(record.ended_s for record in records) - origin
    colour = style.colour.stand_in
    waits: list[tuple[float, float, int]] = []
    answers: list[tuple[float, float, int]] = []
    for row, record in enumerate(records):
        first = record.times_s[0] if record.chunks else record.ended_s
        waits.append((record.sent_s - origin, first - origin, row))
        answers += [(start - origin, end - origin, row) for start, end in _stretches(record.times_s, span / 20)]
    axes.hlines(
        [row for *_, row in waits],
        [start for start, *_ in waits],
        [end for _, end, _ in waits],
        color=colour,
        alpha=0.3,
        linewidth=1.6,
    )
    axes.hlines(
        [row for *_, row in answers],
        [start for start, *_ in answers],
        [end for _, end, _ in answers],
        color=colour,
        linewidth=3.6,
    )
    for outcome, marker, ink in ((Outcome.CANCELLED, "|", INK.stand_in), (None, "x", ALARM.stand_in)):
        ends = [
            (record.ended_s - origin, row)
            for row, record in enumerate(records)
            if not record.has_succeeded and (record.outcome is Outcome.CANCELLED) == (outcome is Outcome.CANCELLED)
        ]
        # an empty one that is not clipped has no bounds, and the layout none either
        if ends:
            mark = {"linestyle": "", "marker": marker, "color": ink, "markersize": 7, "markeredgewidth": 1.6}
            axes.plot([x for x, _ in ends], [y for _, y in ends], clip_on=False, **mark)  # type: ignore[arg-type]
    axes.set_ylim(len(records) - 0.3, -0.7)
    axes.set_yticks([0, len(records) - 1], ["1", str(len(records))])


def _stretches(times_s: Sequence[float], longest_gap_s: float) -> list[tuple[float, float]]:
    """Of an answer, without the gaps that are longer."""
    if not times_s:
        return []
    stretches, start = [], times_s[0]
    for earlier, later in pairwise(times_s):
        if later - earlier > longest_gap_s:
            stretches.append((start, earlier))
            start = later
    return [*stretches, (start, times_s[-1])]


def _request_legend(canvas: Canvas) -> None:
    from matplotlib.lines import Line2D

    ink = INK.stand_in
    handles = [
        Line2D([], [], color=ink, alpha=0.3, linewidth=1.6, label="waits, and computes its prompt"),
        Line2D([], [], color=ink, linewidth=3.6, label="answers"),
        Line2D(
            [], [], color=ink, linestyle="", marker="|", markersize=9, markeredgewidth=1.6, label="cancelled on purpose"
        ),
        Line2D([], [], color=ALARM.stand_in, linestyle="", marker="x", label="did not finish"),
    ]
    canvas.legend(handles=handles, loc="outside lower left", ncols=len(handles))
