"""What the recorder writes is what the scheduler decided, and nothing of what was said."""

import logging
from pathlib import Path

import pytest

from noria.config import EngineConfig
from noria.engine.trace import RowKind, StepTrace
from noria.errors import ConfigError
from noria.scheduler_output import ScheduledSequence, SchedulerOutput
from noria.sequence import FinishReason
from noria.timeline.recorded_trace import RecordedEnd, read_trace
from support.engines import make_request
from support.recordings import record_run

MODES = ("inflight", "static", "dynamic")


@pytest.mark.parametrize("mode", MODES)
def test_every_step_can_be_read_back(tmp_path: Path, mode: str) -> None:
    requests = [make_request(range(7), max_tokens) for max_tokens in (2, 6, 3, 5, 4)]
    outputs = record_run(tmp_path / "trace", requests, batching_mode=mode, max_num_batched_tokens=8)
    trace = read_trace(tmp_path / "trace")

    assert (trace.mode, trace.max_num_seqs, trace.num_blocks, trace.block_size) == (mode, 4, 64, 4)
    assert len(trace.steps) == len(outputs)
    for index, (step, output) in enumerate(zip(trace.steps, outputs, strict=True)):
        assert (step.step, step.started_s, step.ended_s) == (output.step, index, index + 1)
        assert step.admitted_request_ids == output.admitted_request_ids
        assert (step.num_running, step.num_waiting) == (output.num_running, output.num_waiting)
        assert step.num_allocated_blocks == output.num_allocated_blocks
        assert step.num_tokens == output.num_tokens
        for recorded, row in zip(step.rows, output.rows, strict=True):
            assert recorded[:2] == (row.request_id, row.num_computed_tokens)
            assert (recorded.kind is RowKind.PADDING) == row.is_padding
            assert (recorded.kind is RowKind.DRAW) == (row.sampling is not None)
    assert {end.request_id: end.reason for end in trace.ends} == {one.request_id: "length" for one in requests}
    kinds = {row.kind for step in trace.steps for row in step.rows}
    assert kinds == ({RowKind.CHUNK, RowKind.DRAW} if mode == "inflight" else {RowKind.DRAW, RowKind.PADDING})


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemptions_and_copies_are_recorded(tmp_path: Path, preemption: str) -> None:
    requests = [make_request(range(8), 12) for _ in range(3)]
    outputs = record_run(
        tmp_path / "trace", requests, num_blocks=9, num_host_blocks=9, preemption=preemption, admission_headroom=0.0
    )
    steps = read_trace(tmp_path / "trace").steps

    preempted = [one for step in steps for one in step.preempted_request_ids]
    assert preempted == [one for output in outputs for one in output.preempted_request_ids]
    assert preempted, "the pool was not small enough to test anything"
    swapped_out = [one for step in steps for one in step.swapped_out_request_ids]
    num_in = sum(step.num_swapped_in_blocks for step in steps)
    num_out = sum(step.num_swapped_out_blocks for step in steps)
    if preemption == "swap":
        assert swapped_out == preempted
        assert num_in == num_out > 0
    else:
        assert (swapped_out, num_in, num_out) == ([], 0, 0)
        assert sum(step.num_lost_tokens for step in steps) > 0


def test_ends_between_steps_and_no_tokens(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace", EngineConfig(), 8)
    secret = 987654
    trace.record_step(SchedulerOutput(1, (ScheduledSequence(5, [secret] * 3, 0, [1], None),)), 0.0, 1.0)
    trace.record_end(5, FinishReason.CANCELLED, 1.25)
    trace.record_end(6, FinishReason.DEADLINE, 1.5)
    trace.close()
    assert read_trace(tmp_path / "trace").ends == (RecordedEnd(5, 1.25, "cancelled"), RecordedEnd(6, 1.5, "deadline"))
    assert str(secret) not in (tmp_path / "trace").read_text()


def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_path must be a file that can be written"):
        StepTrace(tmp_path / "no such folder" / "trace", EngineConfig(), 8)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_ends_the_recording_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(Path("/dev/full"), EngineConfig(), 8)
    rows = tuple(ScheduledSequence(index, [1], 0, [1], None) for index in range(64))
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            trace.record_step(SchedulerOutput(1, rows), 0.0, 1.0)
        trace.close()
    assert [record.message for record in caplog.records if "the trace ends here" in record.message]
    assert len(caplog.records) <= 2


def test_nothing_is_recorded_after_close(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace", EngineConfig(), 8)
    trace.close()
    before = (tmp_path / "trace").read_text()
    trace.record_end(1, FinishReason.ERROR, 1.0)
    trace.close()
    assert (tmp_path / "trace").read_text() == before
