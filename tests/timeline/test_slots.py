"""Lanes and spans, told from the rows of the steps."""

from itertools import pairwise
from pathlib import Path

import pytest

from noria.engine.trace import RowKind
from noria.timeline.recorded_trace import RecordedEnd, read_trace
from noria.timeline.slots import SpanKind, Stay, lay_out
from support.engines import make_request
from support.recordings import make_step, make_trace, record_run

CHUNK, DRAW, PADDING = RowKind.CHUNK, RowKind.DRAW, RowKind.PADDING


def spans(stay: Stay) -> list[tuple[str, float, float, int]]:
    return [(span.kind.value, span.started_s, span.ended_s, span.num_tokens) for span in stay.spans]


def test_chunks_stand_alone_and_decodes_are_merged() -> None:
    steps = [
        make_step(0, [(1, 0, 6, CHUNK)]),
        make_step(1, [(1, 6, 6, CHUNK)]),
        make_step(2, [(1, 12, 1, DRAW)]),
        make_step(3, [(1, 13, 1, DRAW)]),
        make_step(4, [(1, 14, 1, DRAW)]),
    ]
    timeline = lay_out(make_trace(steps, [RecordedEnd(1, 5.0, "stop")]))
    (stay,) = timeline.stays
    assert (stay.lane, stay.started_s, stay.ended_s) == (0, 0.0, 5.0)
    # the last chunk is of one token, but no decode: nothing had been drawn before
    assert spans(stay) == [("prefill", 0, 1, 6), ("prefill", 1, 2, 6), ("prefill", 2, 3, 1), ("decode", 3, 5, 2)]
    request = timeline.requests[1]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.finish_reason) == (13, 3, "stop")


def test_the_lowest_free_lane_is_taken() -> None:
    steps = [
        make_step(0, [(1, 0, 1, DRAW), (2, 0, 1, DRAW), (3, 0, 1, DRAW)]),
        make_step(1, [(2, 1, 1, DRAW)]),
        make_step(2, [(2, 2, 1, DRAW), (4, 0, 1, DRAW)]),
        make_step(3, [(4, 1, 1, DRAW), (5, 0, 1, DRAW), (6, 0, 1, DRAW)]),
    ]
    timeline = lay_out(make_trace(steps, max_num_seqs=4))
    assert {stay.request_id: stay.lane for stay in timeline.stays} == {1: 0, 2: 1, 3: 2, 4: 0, 5: 1, 6: 2}
    assert timeline.num_lanes == 4


def test_a_sequence_that_has_no_row_for_a_step_keeps_its_lane() -> None:
    """Decodes pause for prompts with prefill_batching separate."""
    steps = [
        make_step(0, [(1, 0, 3, DRAW)]),
        make_step(1, [(1, 3, 1, DRAW)]),
        make_step(2, [(2, 0, 3, DRAW)]),
        make_step(3, [(1, 4, 1, DRAW), (2, 3, 1, DRAW)]),
    ]
    first, second = lay_out(make_trace(steps)).stays
    assert spans(first) == [("prefill", 0, 1, 3), ("decode", 1, 2, 1), ("decode", 3, 4, 1)]
    assert (first.lane, second.lane) == (0, 1)


def test_a_preempted_sequence_leaves_its_lane_and_comes_back_with_a_second_stay() -> None:
    steps = [
        make_step(0, [(1, 0, 3, DRAW), (2, 0, 3, DRAW)]),
        make_step(1, [(1, 3, 1, DRAW), (2, 3, 1, DRAW)]),
        make_step(2, [(1, 4, 1, DRAW)], preempted=[2]),
        make_step(3, [(3, 0, 3, DRAW)]),
        make_step(4, [(3, 3, 1, DRAW), (2, 0, 5, DRAW)]),
        make_step(5, [(2, 5, 1, DRAW)]),
    ]
    timeline = lay_out(make_trace(steps))
    stays = [(stay.request_id, stay.lane, stay.started_s, stay.ended_s, stay.was_preempted) for stay in timeline.stays]
    assert stays == [(1, 0, 0, 3, False), (2, 1, 0, 2, True), (3, 0, 3, 5, False), (2, 1, 4, 6, False)]
    assert [span[0] for span in spans(timeline.stays[3])] == ["prefill", "decode"]
    request = timeline.requests[2]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_preemptions) == (3, 4, 1)


def test_a_sequence_that_was_paused_begins_a_second_stay_when_it_is_admitted_again() -> None:
    steps = [
        make_step(0, [(1, 0, 3, DRAW)], admitted=[1]),
        make_step(1, [(2, 0, 3, DRAW)], admitted=[2]),
        make_step(2, [(1, 0, 4, DRAW), (2, 3, 1, DRAW)], admitted=[1]),
    ]
    stays = lay_out(make_trace(steps)).stays
    assert [(stay.request_id, stay.lane) for stay in stays] == [(1, 0), (2, 0), (1, 1)]
    assert not any(stay.was_preempted for stay in stays)


def test_a_request_that_never_had_a_row_is_known_by_its_end() -> None:
    trace = make_trace([make_step(0, [(1, 0, 3, DRAW)])], [RecordedEnd(2, 0.5, "deadline")])
    timeline = lay_out(trace)
    assert timeline.requests[2].finish_reason == "deadline"
    assert len(timeline.stays) == 1


def test_padding_stays_in_its_lane_until_the_closed_batch_is_over(tmp_path: Path) -> None:
    requests = [make_request(max_tokens=max_tokens, batch_id=1) for max_tokens in (2, 5)]
    requests.append(make_request(max_tokens=1, batch_id=2))
    record_run(tmp_path / "trace", requests, batching_mode="static", max_num_seqs=2)
    trace = read_trace(tmp_path / "trace")
    short, long, later = lay_out(trace).stays
    assert spans(short) == [("prefill", 0, 1, 3), ("decode", 1, 2, 1), ("padding", 2, 5, 3)]
    assert spans(long) == [("prefill", 0, 1, 3), ("decode", 1, 5, 4)]
    assert (later.lane, later.started_s) == (0, 5.0)
    # 2 + 5 + 1 useful rows in 6 steps of 2 slots
    assert trace.slot_utilisation == pytest.approx(8 / 12)


@pytest.mark.parametrize("mode", ["inflight", "static", "dynamic"])
def test_no_lane_holds_two_at_a_time_and_there_are_no_more_than_slots(tmp_path: Path, mode: str) -> None:
    requests = [make_request(range(9), 3 + 5 * index % 11) for index in range(9)]
    # 16 are too few for four sequences at their longest: one is preempted
    num_blocks = 16 if mode == "inflight" else 24
    record_run(tmp_path / "trace", requests, num_blocks, batching_mode=mode, max_num_batched_tokens=8)
    timeline = lay_out(read_trace(tmp_path / "trace"))
    assert timeline.num_lanes == 4
    for lane in range(4):
        stays = [stay for stay in timeline.stays if stay.lane == lane]
        assert stays
        assert all(one.ended_s <= other.started_s for one, other in pairwise(stays))
    if mode == "inflight":
        assert any(stay.was_preempted for stay in timeline.stays), "the pool was not small enough"
    for request in requests:
        traced = timeline.requests[request.request_id]
        assert (traced.num_prompt_tokens, traced.num_output_tokens) == (9, request.params.max_tokens)
    assert {span.kind for stay in timeline.stays for span in stay.spans} >= {SpanKind.PREFILL, SpanKind.DECODE}
