"""The chart of the server's gauges over time. It needs the run's series, which a result may have been kept without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from noria_bench.reporting.charts import Chart
from noria_bench.reporting.drawing import draw, frame, legend
from noria_bench.reporting.loaded import Load
from noria_bench.reporting.request_charts import WIDE, Shown
from noria_bench.results import SeriesPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_MAX_POINTS = 300
_GAUGES: tuple[tuple[str, Callable[[SeriesPoint], float]], ...] = (
    ("waiting sequences", lambda point: point.num_waiting),
    ("running sequences", lambda point: point.num_running),
    ("KV usage, %", lambda point: 100 * point.kv_usage),
)


def over_time(key: str, shown: Sequence[Shown], load: Load) -> Chart | None:
    """Queue, batch and KV cache of one run of each label."""
    curves = [(one, points) for one in shown if (points := _points(one))]
    if not curves:
        return None
    has_slots = any(points[-1].slot_steps > points[0].slot_steps for _, points in curves)
    num_rows = len(_GAUGES) + has_slots

    def paint(canvas: Canvas) -> None:
        from matplotlib.ticker import MaxNLocator

        panels = canvas.subplots(num_rows, sharex=True, squeeze=False)[:, 0]
        for axes, (name, gauge) in zip(panels, _GAUGES, strict=False):
            frame(axes, name, "", "")
            for one, points in curves:
                _draw_steps(axes, one, [point.time_s for point in points], [gauge(point) for point in points])
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.set_ylim(0, 1.08 * max(1, *(gauge(point) for _, points in curves for point in points)))
        if has_slots:
            frame(panels[-1], "slot utilisation, %", "", "")
            for one, points in curves:
                times, shares = _slot_shares(points)
                _draw_steps(panels[-1], one, times, shares)
            panels[-1].set_ylim(0, 103)
        panels[-1].set_xlabel("seconds since the first request after warm-up")
        panels[-1].set_xlim(left=0)
        legend(canvas, panels[0])

    runs = ", ".join(one.run_name for one, _ in curves)
    return Chart(
        f"Queue, batch and KV cache over time, {load}",
        f"The server's gauges, as sampled in the runs {runs}. Those waiting are in the engine's queue, or in Triton's "
        "before it.",
        draw(key, (WIDE, 1.4 * num_rows + 0.9), paint),
        is_wide=True,
    )


def _points(one: Shown) -> list[SeriesPoint]:
    """At most _MAX_POINTS, in seconds since the first request after warm-up; those before it left out."""
    points = one.source.series(one.run)
    if not points:
        return []
    origin = min((record.sent_s for record in one.source.records(one.run)), default=points[0].time_s)
    since = [_shifted(point, origin) for point in points if point.time_s >= origin]
    stride = math.ceil(len(since) / _MAX_POINTS) or 1
    kept = since[::stride]
    return kept if not since or kept[-1] is since[-1] else [*kept, since[-1]]


def _shifted(point: SeriesPoint, origin_s: float) -> SeriesPoint:
    return replace(point, time_s=point.time_s - origin_s)


def _slot_shares(points: Sequence[SeriesPoint]) -> tuple[list[float], list[float]]:
    """Between one sample and the next, in %, at the time of the earlier."""
    times, shares = [], []
    for earlier, later in pairwise(points):
        offered = later.slot_steps - earlier.slot_steps
        if offered > 0:
            times.append(earlier.time_s)
            shares.append(100 * (later.useful_slot_steps - earlier.useful_slot_steps) / offered)
    return times, shares


def _draw_steps(axes: Axes, one: Shown, times: Sequence[float], values: Sequence[float]) -> None:
    axes.step(
        times,
        values,
        where="post",
        color=one.style.colour.stand_in,
        linestyle=one.style.line,
        linewidth=1.5,
        label=one.name,
    )
