"""Draws a study's panels. Needs matplotlib, which is loaded when something is drawn. Knows no study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.simulation.studies.study import Mark, Panel, Series, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# told apart with any kind of colour vision: Okabe and Ito 2008, less the yellow, which is faint on white
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK, _GRID = "#222222", "#dddddd"
_PANEL_INCHES = (4.6, 3.4)
# a panel that has a row to itself
_WIDE_PANEL_INCHES = (7.6, 2.3)
_LEGEND_LINE_INCHES = 0.26
# more would hide the line
_MAX_MARKERS = 12


def draw_study(study: Study, paths: Sequence[Path]) -> None:
    """Write the study's picture in the format of each path's suffix, on opaque white."""
    from matplotlib import rc_context

    # fixed ids, so that the same study gives the same file
    with rc_context({"svg.hashsalt": "noria", "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = _figure(study.panels, study.num_columns)
        for path in paths:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(panels: Sequence[Panel], num_columns: int) -> Figure:
    from matplotlib.figure import Figure

    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    # one time axis for all
    is_stacked = 1 < num_rows == len(panels)
    panel_width, panel_height = _WIDE_PANEL_INCHES if is_stacked else _PANEL_INCHES
    width = max(num_columns * panel_width, _WIDE_PANEL_INCHES[0])
    figure = Figure(facecolor="white", layout="constrained")
    handles: dict[str, Any] = {}
    for axes, panel in zip(
        figure.subplots(num_rows, num_columns, sharex=is_stacked, squeeze=False).flat, panels, strict=True
    ):
        _draw_panel(axes, panel)
        if is_stacked:
            axes.label_outer()
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # an entry is its mark and so many characters of about 0.06 inches
    num_in_line = int(width / (0.7 + 0.06 * max(map(len, handles), default=0)))
    num_lines = -(-len(handles) // num_in_line)
    figure.set_size_inches(width, num_rows * panel_height + num_lines * _LEGEND_LINE_INCHES)
    if handles:
        num_legend_columns = -(-len(handles) // num_lines)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=num_legend_columns, frameon=False
        )
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    _scale(axes.xaxis, axes.set_xscale, panel.x_scale)
    _scale(axes.yaxis, axes.set_yscale, panel.y_scale)
    bars = [series for series in panel.series if series.mark is Mark.BARS]
    for series in panel.series:
        if series.mark is Mark.BARS:
            _draw_bars(axes, series, bars.index(series), len(bars))
        elif panel.has_end_labels and series.mark is Mark.LINE:
            _draw_series(axes, replace(series, label=""))
            _label_end(axes, series)
        else:
            _draw_series(axes, series)
    if panel.y_scale == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_ylim(bottom=0)


def _scale(axis: Axis, set_scale: Callable[..., None], scale: str) -> None:
    """Numbers at the ticks are written out: 128, not 2^7."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if scale == "linear":
        return
    set_scale("log", base=2 if scale == "log2" else 10)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_series(axes: Axes, series: Series) -> None:
    colour = _COLOURS[series.colour % len(_COLOURS)]
    marker = _MARKERS[series.colour % len(_MARKERS)]
    label = series.label or None
    line = "--" if series.is_dashed else "-"
    if series.mark is Mark.LEVEL:
        axes.axhline(series.y[0], color=colour, linestyle=line, linewidth=1.4, label=label)
    elif series.mark is Mark.STEPS:
        axes.step(series.x, series.y, where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
    elif series.mark is Mark.POINTS:
        axes.plot(series.x, series.y, color=colour, linestyle="", marker=marker, markersize=6, label=label)
    else:
        size = 0 if series.is_dashed or len(series.x) > _MAX_MARKERS else 4.5
        axes.plot(
            series.x, series.y, color=colour, linestyle=line, linewidth=1.6, marker=marker, markersize=size, label=label
        )


def _label_end(axes: Axes, series: Series) -> None:
    axes.annotate(
        series.label,
        (series.x[-1], series.y[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=_COLOURS[series.colour % len(_COLOURS)],
        fontweight="bold",
        annotation_clip=False,
    )


def _draw_bars(axes: Axes, series: Series, number: int, num_series: int) -> None:
    width = 0.8 / num_series
    places = [place + (number - (num_series - 1) / 2) * width for place in range(len(series.x))]
    colour = _COLOURS[series.colour % len(_COLOURS)]
    bars = axes.bar(places, series.y, width * 0.92, color=colour, label=series.label or None)
    axes.bar_label(bars, fmt="%.1f", fontsize=7.5, padding=1)
    axes.set_xticks(range(len(series.x)), [str(name) for name in series.x])
