"""A recorded trace as Chrome's trace events, for ui.perfetto.dev or chrome://tracing.

The format: "Trace Event Format" by Google; here complete events (X), counters (C), instants (i) and names (M), times
in microseconds since the first step. One process holds a track for each slot, the other the engine's own tracks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noria.timeline.recorded_trace import RecordedTrace
from noria.timeline.slots import SlotTimeline, SpanKind, Stay, lay_out

Event = dict[str, Any]

_SLOTS_PID = 1
_ENGINE_PID = 2
_STEPS_TID = 1
_REQUESTS_TID = 2


def write_chrome_trace(trace: RecordedTrace, path: Path) -> None:
    """Raises OSError."""
    content = {"displayTimeUnit": "ms", "traceEvents": chrome_events(trace)}
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def chrome_events(trace: RecordedTrace) -> list[Event]:
    """All events: the names of the tracks first, then by time; an outer slice stands before those within it."""
    timeline = lay_out(trace)
    clock = _Clock(trace.started_s)
    timed = [
        *_stay_events(timeline, clock),
        *_step_events(trace, clock),
        *_counter_events(trace, clock),
        *_instant_events(trace, clock),
    ]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return [*_name_events(trace, timeline), *timed]


class _Clock:
    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s

    def us(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)

    def span(self, started_s: float, ended_s: float) -> Event:
        start = self.us(started_s)
        return {"ts": start, "dur": self.us(ended_s) - start}


def _name_events(trace: RecordedTrace, timeline: SlotTimeline) -> Iterator[Event]:
    yield _name("process_name", _SLOTS_PID, 0, f"slots, {trace.mode}")
    yield _name("process_name", _ENGINE_PID, 0, f"engine, {trace.mode}")
    for lane in range(timeline.num_lanes):
        yield _name("thread_name", _SLOTS_PID, lane + 1, f"slot {lane}")
    yield _name("thread_name", _ENGINE_PID, _STEPS_TID, "steps")
    yield _name("thread_name", _ENGINE_PID, _REQUESTS_TID, "requests")


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _stay_events(timeline: SlotTimeline, clock: _Clock) -> Iterator[Event]:
    for stay in timeline.stays:
        place = {"ph": "X", "pid": _SLOTS_PID, "tid": stay.lane + 1}
        yield {
            **place,
            "name": f"request {stay.request_id}",
            **clock.span(stay.started_s, stay.ended_s),
            "args": _request_args(timeline, stay),
        }
        for span in stay.spans:
            name = f"prefill {span.num_tokens}" if span.kind is SpanKind.PREFILL else span.kind.value
            args = {"steps": span.num_steps, "tokens": span.num_tokens}
            yield {**place, "name": name, **clock.span(span.started_s, span.ended_s), "args": args}


def _request_args(timeline: SlotTimeline, stay: Stay) -> dict[str, object]:
    request = timeline.requests[stay.request_id]
    return {
        "prompt tokens": request.num_prompt_tokens,
        "output tokens": request.num_output_tokens,
        "preemptions": request.num_preemptions,
        "finish reason": request.finish_reason or "none yet",
    }


def _step_events(trace: RecordedTrace, clock: _Clock) -> Iterator[Event]:
    for step in trace.steps:
        args = {
            "tokens": step.num_tokens,
            "rows": len(step.rows),
            "allocated blocks": step.num_allocated_blocks,
            "swapped in blocks": step.num_swapped_in_blocks,
            "swapped out blocks": step.num_swapped_out_blocks,
            "prefix hit tokens": step.num_prefix_hit_tokens,
            "lost tokens": step.num_lost_tokens,
        }
        yield {
            "ph": "X",
            "pid": _ENGINE_PID,
            "tid": _STEPS_TID,
            "name": f"step {step.step}",
            **clock.span(step.started_s, step.ended_s),
            "args": args,
        }


def _counter_events(trace: RecordedTrace, clock: _Clock) -> Iterator[Event]:
    """A counter keeps its value until its next event, so just the changes."""
    latest: dict[str, dict[str, int]] = {}
    for step in trace.steps:
        counters = {
            "sequences": {"running": step.num_running, "waiting": step.num_waiting},
            "KV blocks": {"allocated": step.num_allocated_blocks, "cached": step.num_cached_blocks},
        }
        for name, args in counters.items():
            if latest.get(name) != args:
                latest[name] = args
                yield {"ph": "C", "pid": _ENGINE_PID, "name": name, "ts": clock.us(step.started_s), "args": args}


def _instant_events(trace: RecordedTrace, clock: _Clock) -> Iterator[Event]:
    for step in trace.steps:
        swapped_out = set(step.swapped_out_request_ids)
        for request_id in step.preempted_request_ids:
            word = "swapped out" if request_id in swapped_out else "preempted"
            yield _instant(f"{word} {request_id}", clock.us(step.started_s))
        for request_id in step.admitted_request_ids:
            yield _instant(f"admitted {request_id}", clock.us(step.started_s))
    for end in trace.ends:
        # one that ended before the first step stands at the edge
        yield _instant(f"finished {end.request_id}: {end.reason}", max(0, clock.us(end.ended_s)))


def _instant(name: str, ts: int) -> Event:
    return {"ph": "i", "s": "t", "pid": _ENGINE_PID, "tid": _REQUESTS_TID, "name": name, "ts": ts}
