"""Draws slots over time: a panel for each trace, a row for each slot, a colour for each request.

Needs matplotlib, which is loaded when something is drawn. Knows nothing of how the traces were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.errors import ConfigError
from noria.timeline.recorded_trace import RecordedTrace
from noria.timeline.slots import SlotTimeline, Span, SpanKind, Stay, TracedRequest, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# told apart with any kind of colour vision: the "muted" scheme of Paul Tol's technical note SRON/EPS/TN/09-002, in an
# order in which neighbours differ in lightness too
_COLOURS = ("#88ccee", "#cc6677", "#117733", "#ddcc77", "#332288", "#44aa99", "#aa4499", "#999933", "#882255")
_INK = "#222222"
_LANE_HEIGHT = 0.84
_INCHES = {"width": 10.0, "lane": 0.2, "panel": 0.55, "margin": 0.75}
# a request's number is left out where its bar is narrower than this share of the axis
_MIN_LABEL_SHARE = 0.018


def check_can_draw() -> None:
    """Raises ConfigError where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("drawing needs matplotlib: pip install noria[plots]")


def draw_slots(traces: Mapping[str, RecordedTrace], paths: Sequence[Path]) -> None:
    """Write the picture of all traces, one below the other on one time axis, in the format of each path's suffix.

    traces: by their titles. The same request has the same colour and number in all of them.
    Raises ConfigError where matplotlib is missing, OSError and ValueError (a suffix without a format) as it does.
    """
    check_can_draw()
    from matplotlib import rc_context

    # fixed ids, so that the same traces give the same file
    with rc_context({"svg.hashsalt": "noria", "hatch.linewidth": 0.6, "font.size": 9}):
        figure = _figure(traces)
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def match_requests(all_requests: Sequence[Mapping[int, TracedRequest]]) -> list[dict[int, int]]:
    """For each trace a number, from 0, for each of its requests, the same for the same request of the workload.

    Traces know requests by the order of their arrival, which differs from run to run; prompt and output lengths tell
    which is which. One that has no counterpart in the first trace gets a number of its own.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    matches = []
    for requests in all_requests:
        num_alike: dict[tuple[int, int], int] = {}
        match = {}
        for request_id, request in requests.items():
            lengths = (request.num_prompt_tokens, request.num_output_tokens)
            num_alike[lengths] = num_alike.get(lengths, 0) + 1
            match[request_id] = numbers.setdefault((*lengths, num_alike[lengths]), len(numbers))
        matches.append(match)
    return matches


def _figure(traces: Mapping[str, RecordedTrace]) -> Figure:
    from matplotlib.figure import Figure

    timelines = [lay_out(trace) for trace in traces.values()]
    matches = match_requests([timeline.requests for timeline in timelines])
    heights = [_INCHES["lane"] * timeline.num_lanes + _INCHES["panel"] for timeline in timelines]
    figure = Figure(
        figsize=(_INCHES["width"], sum(heights) + _INCHES["margin"]), facecolor="white", layout="constrained"
    )
    panels = figure.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest_s = max(trace.ended_s - trace.started_s for trace in traces.values())
    for axes, (title, trace), timeline, match in zip(panels, traces.items(), timelines, matches, strict=True):
        axes.set_xlim(0, longest_s)
        _draw_frame(axes, title, trace, timeline)
        for stay in timeline.stays:
            _draw_stay(axes, stay, match[stay.request_id], trace.started_s)
    panels[-1].set_xlabel("seconds")
    _draw_legend(figure, has_preemptions=any(stay.was_preempted for one in timelines for stay in one.stays))
    return figure


def _draw_frame(axes: Axes, title: str, trace: RecordedTrace, timeline: SlotTimeline) -> None:
    seconds = trace.ended_s - trace.started_s
    axes.set_title(
        f"{title}: {seconds:.1f} s, slot utilisation {100 * trace.slot_utilisation:.0f} %",
        loc="left",
        fontsize=10,
        fontweight="bold",
        color=_INK,
    )
    axes.set_ylim(timeline.num_lanes - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_lanes))
    axes.set_ylabel("slot")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(seconds, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)))


def _draw_stay(axes: Axes, stay: Stay, number: int, origin_s: float) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    start, end = stay.started_s - origin_s, stay.ended_s - origin_s
    # what no span covers: in its slot, but not computed
    _draw_bar(axes, stay.lane, start, end, facecolor=_mix(colour, "#ffffff", 0.7))
    for span in stay.spans:
        _draw_bar(axes, stay.lane, span.started_s - origin_s, span.ended_s - origin_s, **_style(span, colour))
    for span in stay.spans:
        if span.kind is SpanKind.DECODE and span.ended_s - span.started_s > _MIN_LABEL_SHARE * axes.get_xlim()[1]:
            middle = (span.started_s + span.ended_s) / 2 - origin_s
            ink = "white" if _luminance(colour) < 0.45 else _INK
            axes.text(
                middle,
                stay.lane,
                str(number + 1),
                ha="center",
                va="center_baseline",
                fontsize=7,
                fontweight="bold",
                color=ink,
            )
    if stay.was_preempted:
        axes.plot(end, stay.lane, marker="X", markersize=6, color=_INK, markeredgecolor="white", clip_on=False)


def _style(span: Span, colour: str) -> dict[str, Any]:
    if span.kind is SpanKind.PADDING:
        return {"facecolor": "#f1f1f1", "edgecolor": "#a8a8a8", "hatch": "////"}
    if span.kind is SpanKind.PREFILL:
        return {"facecolor": _mix(colour, "#000000", 0.4)}
    return {"facecolor": _mix(colour, "#ffffff", 0.2)}


def _draw_bar(axes: Axes, lane: int, start: float, end: float, **style: Any) -> None:
    axes.broken_barh([(start, end - start)], (lane - _LANE_HEIGHT / 2, _LANE_HEIGHT), linewidth=0.0, **style)


def _draw_legend(figure: Figure, has_preemptions: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    example = _COLOURS[0]
    handles: list[Patch | Line2D] = [
        Patch(label="prompt", **_style(Span(SpanKind.PREFILL, 0, 0), example)),
        Patch(label="output, one colour a request", **_style(Span(SpanKind.DECODE, 0, 0), example)),
        Patch(label="padding: finished, waits for its batch", **_style(Span(SpanKind.PADDING, 0, 0), example)),
        Patch(label="free", facecolor="white", edgecolor="#a8a8a8", linewidth=0.8),
    ]
    if has_preemptions:
        handles.append(Line2D([], [], marker="X", linestyle="", color=_INK, label="preempted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def _mix(colour: str, other: str, share: float) -> str:
    """`share` of `other` in `colour`, both as #rrggbb."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _luminance(colour: str) -> float:
    """Roughly how light it looks, 0 to 1: ITU-R BT.601 on the coded values."""
    red, green, blue = _channels(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
