"""The events are such as Perfetto reads: sorted, nested, never of negative length."""

import json
from pathlib import Path

import pytest

from noria.engine.trace import RowKind
from noria.timeline.chrome_trace import chrome_events, write_chrome_trace
from noria.timeline.recorded_trace import RecordedEnd, read_trace
from support.engines import make_request
from support.recordings import make_step, make_trace, record_run

NEEDED = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "s", "tid"}, "M": {"args"}}


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_the_file_is_valid_and_slices_nest(tmp_path: Path, mode: str) -> None:
    requests = [make_request(range(9), 4 + index % 5) for index in range(6)]
    record_run(tmp_path / "trace", requests, num_blocks=16, batching_mode=mode, max_num_batched_tokens=8)
    write_chrome_trace(read_trace(tmp_path / "trace"), tmp_path / "events")
    events = json.loads((tmp_path / "events").read_text())["traceEvents"]

    for event in events:
        assert NEEDED[event["ph"]] | {"name", "pid"} <= event.keys()
        assert event.get("dur", 0) >= 0
        assert event.get("ts", 0) >= 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert tracks == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1)}
    for track in tracks:
        open_ends: list[int] = []
        for event in events:
            if event["ph"] != "X" or (event["pid"], event["tid"]) != track:
                continue
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], "a slice outlives the one that it is in"
            open_ends.append(end)


def test_what_happened_to_whom_is_on_the_tracks() -> None:
    steps = [
        make_step(3, [(1, 0, 4, RowKind.CHUNK)], admitted=[1], num_running=1, num_waiting=1, num_allocated_blocks=2),
        make_step(4, [(1, 4, 2, RowKind.DRAW)], num_running=1, num_waiting=1, num_allocated_blocks=2),
        make_step(5, [(2, 0, 2, RowKind.DRAW)], preempted=[1], admitted=[2], num_running=1, num_allocated_blocks=1),
    ]
    ends = [RecordedEnd(2, 6.0, "stop"), RecordedEnd(7, 2.5, "cancelled")]
    events = chrome_events(make_trace(steps, ends))

    instants = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert instants == [
        ("admitted 1", 0),
        ("finished 7: cancelled", 0),
        ("preempted 1", 2_000_000),
        ("admitted 2", 2_000_000),
        ("finished 2: stop", 3_000_000),
    ]
    slices = [
        (event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == 1
    ]
    assert slices == [
        ("request 1", 0, 2_000_000),
        ("prefill 4", 0, 1_000_000),
        ("prefill 2", 1_000_000, 1_000_000),
        ("request 2", 2_000_000, 1_000_000),
        ("prefill 2", 2_000_000, 1_000_000),
    ]
    request = next(event for event in events if event["name"] == "request 1")
    assert request["args"] == {
        "prompt tokens": 6,
        "output tokens": 1,
        "preemptions": 1,
        "finish reason": "none yet",
    }
    # just where they change
    blocks = [(event["ts"], event["args"]["allocated"]) for event in events if event["name"] == "KV blocks"]
    assert blocks == [(0, 2), (2_000_000, 1)]
    steps_track = [event["args"]["tokens"] for event in events if event["name"].startswith("step ")]
    assert steps_track == [4, 2, 2]
