"""How steps overlap when the engine runs ahead: what is launched when, how often, and what is said of it afterwards."""

from pathlib import Path
from typing import Any

import pytest

from noria.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import RequestOutput
from noria.engine.trace import RowKind, StepTrace
from noria.scheduler_output import SchedulerOutput, StepResult
from noria.sequence import FinishReason, Request
from noria.timeline.recorded_trace import read_trace
from support.byte_tokenizer import ByteTokenizer
from support.engines import AheadHashRunner, FakePendingStep, expected_output, make_request, make_scheduler


class TimedStep:
    def __init__(self, device: "Device", step: FakePendingStep, number: int) -> None:
        self._device, self._step, self._number = device, step, number
        # one step after the other
        device.ready_s = max(device.ready_s, device.now) + device.STEP_S
        self._ready_s = device.ready_s

    def result(self) -> StepResult:
        self._device.now = max(self._device.now, self._ready_s)
        self._device.log.append(f"result {self._number}")
        return self._step.result()


class Device(AheadHashRunner):
    """Computes a step in STEP_S; to decide and launch one takes the host HOST_S. The only things that take time."""

    STEP_S, HOST_S = 1.0, 0.25

    def __init__(self, num_blocks: int = 64, trace: StepTrace | None = None, **config: Any) -> None:
        super().__init__(num_blocks, 4, num_blocks)
        self.now = self.ready_s = 0.0
        self.log: list[str] = []
        counter = StatsCounter(num_blocks, 4)
        self.engine = Engine(
            make_scheduler(num_blocks, num_blocks, **config),
            self,
            ByteTokenizer(),
            counter,
            lambda: self.now,
            trace,
            ahead=self,
        )
        self.given: dict[int, list[RequestOutput]] = {}

    def submit(self, output: SchedulerOutput) -> TimedStep:  # type: ignore[override]
        self.now += self.HOST_S
        pending = super().submit(output)
        self.log.append(f"launch {output.step}")
        return TimedStep(self, pending, output.step)

    def run(self, *requests: Request, arrived_s: float | None = None) -> None:
        for request in requests:
            self.engine.add(request, arrived_s)
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        self.engine.step()
        for output in self.engine.take_outputs():
            self.given.setdefault(output.request_id, []).append(output)

    def tokens(self, request: Request) -> list[int]:
        return [token.token_id for output in self.given[request.request_id] for token in output.tokens]

    def end(self, request: Request) -> RequestOutput:
        return self.given[request.request_id][-1]


def with_stop_at(index: int, max_tokens: int) -> Request:
    """Its token of that index is a stop token."""
    prompt = (1, 2, 3)
    return make_request(prompt, max_tokens, stop_token_ids=expected_output(prompt, index + 1)[-1:])


def test_a_step_is_launched_before_the_result_of_the_last() -> None:
    device = Device()
    device.run(make_request(max_tokens=3))
    assert device.log == ["launch 1", "launch 2", "result 1", "launch 3", "result 2", "result 3"]


def test_penalties_wait_for_the_token_that_they_count() -> None:
    device = Device()
    device.run(make_request(max_tokens=3, frequency_penalty=0.5))
    assert device.log == ["launch 1", "result 1", "launch 2", "result 2", "launch 3", "result 3"]


def test_only_an_end_that_nobody_foresaw_costs_a_row(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    device = Device(trace=StepTrace(path, EngineConfig(), 64))
    foreseen, stops = make_request(max_tokens=5), with_stop_at(1, max_tokens=9)
    device.run(foreseen, stops)
    device.engine.close()
    assert [len(device.tokens(request)) for request in (foreseen, stops)] == [5, 2]
    rows = [row for step in read_trace(path).steps for row in step.rows]
    kinds = [[row.kind for row in rows if row.request_id == one.request_id] for one in (foreseen, stops)]
    assert kinds == [[RowKind.DRAW] * 5, [RowKind.DRAW] * 2 + [RowKind.PADDING]]
    stats = device.engine.stats()
    assert (stats.num_steps, stats.num_rows, stats.num_useful_slot_steps) == (5, 8, 7)


def test_no_second_is_counted_twice(tmp_path: Path) -> None:
    """Four steps of 1 s: the host's work for the second to the fourth is hidden behind the one before."""
    path = tmp_path / "trace"
    device = Device(trace=StepTrace(path, EngineConfig(), 64))
    request = make_request(max_tokens=4)
    device.run(request)
    device.engine.close()
    assert device.now == 0.25 + 4.0
    assert device.engine.stats().step_seconds == device.now
    steps = read_trace(path).steps
    assert [(step.started_s, step.ended_s) for step in steps] == [(0, 1.25), (1.25, 2.25), (2.25, 3.25), (3.25, 4.25)]
    timings = device.end(request).timings
    assert timings is not None
    assert (timings.ttft_s, timings.tpot_s, timings.e2e_s) == (1.25, 1.0, 4.25)


def test_who_joins_a_launched_step_waits_until_it_begins() -> None:
    device = Device()
    first, second = make_request(max_tokens=4), make_request(max_tokens=2)
    device.engine.add(first)
    device.step()
    # its step is launched 0.25 s later, and begins when the first is over at 1.25 s
    device.run(second)
    timings = device.end(second).timings
    assert timings is not None
    assert (timings.queue_s, timings.ttft_s) == (1.0, 2.0)


def test_nobody_is_driven_out_for_a_block_that_is_about_to_be_free() -> None:
    """Each has two of four blocks. The fourth step needs another, and the third gives one request its last token."""
    device = Device(num_blocks=4, admission_headroom=0.0)
    ends, goes_on = make_request(range(6), max_tokens=3), make_request(range(6), max_tokens=9)
    device.run(ends, goes_on)
    assert device.engine.stats().num_preemptions == 0
    assert device.log.index("result 3") < device.log.index("launch 4") < device.log.index("launch 5")
    assert device.log.index("launch 5") < device.log.index("result 4")


def test_blocks_are_published_when_the_step_that_brought_them_back_is_over() -> None:
    """They were as soon as the tokens came that were drawn before the swap; the copies could still fail."""
    device = Device(preemption="swap", prefix_caching=True)
    # the second step fills the second block
    request = make_request(range(7), max_tokens=9)
    device.engine.add(request)
    device.step()
    device.step()
    device.engine.pause(request.request_id)
    device.engine.resume(request.request_id)
    device.breaks = True
    device.step()
    assert device.log[-2:] == ["launch 3", "result 2"]
    published = device.engine._scheduler._cache.pool._hash_by_block
    assert [block for block in published if None in device._blocks[block]] == []


@pytest.mark.parametrize("failure", ["refuses", "breaks"])
def test_a_failed_step_fails_its_requests_and_those_launched_behind_it(failure: str) -> None:
    device = Device(max_num_seqs=2)
    short, long, later = make_request(max_tokens=2), make_request(max_tokens=9), make_request(max_tokens=3)
    for request in (short, long):
        device.engine.add(request)
    device.step()
    device.step()
    # short is complete, and has no row in the third step, which fails
    setattr(device, failure, True)
    device.run(later)
    reasons = [device.end(request).finish_reason for request in (short, long, later)]
    # what cannot be launched has nothing behind it
    last = FinishReason.LENGTH if failure == "refuses" else FinishReason.ERROR
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, last]
    assert device.tokens(short) == expected_output((1, 2, 3), 2)
    assert device.tokens(long) == expected_output((1, 2, 3), 2)
    device.run(after := make_request(max_tokens=3))
    assert device.end(after).finish_reason is FinishReason.LENGTH
    device.engine.check_integrity()
    assert device.engine.stats().num_kv_blocks_held == 0
