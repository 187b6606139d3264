"""Which request stood in which slot, when, and what its slot was used for there.

The scheduler has no numbered slots, only rows; here each stay of a sequence in the batch takes the lowest lane that is
free, which is what slots are to the eye. Knows nothing of colours or file formats.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from noria.engine.trace import RowKind
from noria.timeline.recorded_trace import RecordedRow, RecordedStep, RecordedTrace


class SpanKind(Enum):
    """What a slot was used for: a chunk of known tokens, one new token a step, or a finished row's padding."""

    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"


@dataclass(slots=True)
class Span:
    """Part of a stay: one prefill chunk, or consecutive steps of decoding or padding. Times as in the trace."""

    kind: SpanKind
    started_s: float
    ended_s: float
    num_steps: int = 1
    num_tokens: int = 0


@dataclass(slots=True)
class Stay:
    """A sequence from the step in which it joined the batch to its last row in it.

    lane: from 0. A sequence that is preempted and comes back has several stays.
    """

    request_id: int
    started_s: float
    ended_s: float
    spans: list[Span] = field(default_factory=list)
    was_preempted: bool = False
    lane: int = -1


@dataclass(slots=True)
class TracedRequest:
    """What the trace tells of a request. finish_reason is None if it had not ended when the recording did.

    num_prompt_tokens: 0 until its first token has been drawn, as long as the rows do not tell.
    """

    request_id: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class SlotTimeline:
    """stays: in the order in which they began. requests: by id, in the order of their ids."""

    stays: tuple[Stay, ...]
    requests: Mapping[int, TracedRequest]
    num_lanes: int


def lay_out(trace: RecordedTrace) -> SlotTimeline:
    """The stays of all sequences, each in its lane."""
    builder = _Builder()
    for index, step in enumerate(trace.steps):
        builder.take(index, step)
    for end in trace.ends:
        builder.request(end.request_id).finish_reason = end.reason
    num_lanes = _assign_lanes(builder.stays)
    requests = dict(sorted(builder.requests.items()))
    return SlotTimeline(tuple(builder.stays), requests, max(num_lanes, trace.max_num_seqs))


class _Builder:
    """Grows stays and requests, step by step."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self.requests: dict[int, TracedRequest] = {}
        self._open: dict[int, Stay] = {}
        # the step in which a request had its latest row
        self._last_steps: dict[int, int] = {}

    def request(self, request_id: int) -> TracedRequest:
        return self.requests.setdefault(request_id, TracedRequest(request_id))

    def take(self, index: int, step: RecordedStep) -> None:
        for request_id in step.preempted_request_ids:
            self.request(request_id).num_preemptions += 1
            stay = self._open.pop(request_id, None)
            if stay is not None:
                stay.was_preempted = True
        # one that was paused for its slow reader left without a word
        for request_id in step.admitted_request_ids:
            self._open.pop(request_id, None)
        for row in step.rows:
            self._take_row(index, step, row)

    def _take_row(self, index: int, step: RecordedStep, row: RecordedRow) -> None:
        request = self.request(row.request_id)
        stay = self._open.get(row.request_id)
        if stay is None:
            stay = self._open[row.request_id] = Stay(row.request_id, step.started_s, step.ended_s)
            self.stays.append(stay)
        stay.ended_s = step.ended_s
        kind = _span_kind(row, request)
        is_consecutive = self._last_steps.get(row.request_id) == index - 1
        last = stay.spans[-1] if stay.spans else None
        if last is not None and is_consecutive and kind is last.kind and kind is not SpanKind.PREFILL:
            last.ended_s = step.ended_s
            last.num_steps += 1
            last.num_tokens += row.num_tokens
        else:
            stay.spans.append(Span(kind, step.started_s, step.ended_s, num_tokens=row.num_tokens))
        self._last_steps[row.request_id] = index
        if row.kind is RowKind.DRAW:
            # the first token that is drawn is the one after the prompt
            request.num_prompt_tokens = request.num_prompt_tokens or row.num_computed_tokens + row.num_tokens
            request.num_output_tokens += 1


def _span_kind(row: RecordedRow, request: TracedRequest) -> SpanKind:
    if row.kind is RowKind.PADDING:
        return SpanKind.PADDING
    is_decode = row.kind is RowKind.DRAW and row.num_tokens == 1 and request.num_output_tokens > 0
    return SpanKind.DECODE if is_decode else SpanKind.PREFILL


def _assign_lanes(stays: Iterable[Stay]) -> int:
    """Give each stay the lowest lane that is free when it begins. Returns how many lanes that took."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    num_lanes = 0
    for stay in stays:
        while taken and taken[0][0] <= stay.started_s:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        stay.lane = heapq.heappop(free)
        heapq.heappush(taken, (stay.ended_s, stay.lane))
    return num_lanes
