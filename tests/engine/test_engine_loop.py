"""The engine's thread: nobody is left without a last output, whatever goes wrong, in whatever order commands come, and
whether it waits for each step or runs ahead."""

import threading
import time
from collections.abc import Sequence

import pytest

from noria.engine import engine_loop
from noria.engine.engine import Engine
from noria.engine.engine_loop import EngineLoop
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput, StepReport
from noria.errors import DeviceLost, EngineFailure
from noria.scheduler_output import SchedulerOutput, StepResult
from noria.sequence import FinishReason, Request
from support.byte_tokenizer import ByteTokenizer
from support.engines import AheadHashRunner, FakePendingStep, expected_output, make_request, make_scheduler
from support.waiting import TIMEOUT_S, wait_until


class BrokenTokenizer(ByteTokenizer):
    """Cannot decode while it is broken."""

    is_broken = False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.is_broken:
            raise RuntimeError("cannot decode")
        return super().decode(token_ids, skip_special_tokens)


class HeldPendingStep:
    def __init__(self, step: FakePendingStep, may_go_on: threading.Event) -> None:
        self._step, self._may_go_on = step, may_go_on

    def result(self) -> StepResult:
        assert self._may_go_on.wait(TIMEOUT_S), "the test never let the step go on"
        return self._step.result()


class HeldRunner(AheadHashRunner):
    """Begins a step and finishes it when it may: what is asked meanwhile surely comes before the next one."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S), "the test never let the step go on"
        return super().execute(output)


class HeldAheadRunner(HeldRunner):
    """Launches a step at once, and holds back its result."""

    def submit(self, output: SchedulerOutput) -> HeldPendingStep:  # type: ignore[override]
        self.has_begun.set()
        return HeldPendingStep(super().submit(output), self.may_go_on)

    def execute(self, output: SchedulerOutput) -> StepResult:
        return AheadHashRunner.execute(self, output)


class Fixture:
    def __init__(self, is_ahead: bool) -> None:
        self.tokenizer = BrokenTokenizer()
        self.runner = HeldAheadRunner() if is_ahead else HeldRunner()
        ahead = self.runner if is_ahead else None
        self.engine = Engine(make_scheduler(), self.runner, self.tokenizer, StatsCounter(64, 4), ahead=ahead)
        self.outputs: list[RequestOutput] = []
        self.stats = EngineStats()
        self.loop = EngineLoop(self.engine, self._deliver)

    def _deliver(self, report: StepReport) -> None:
        self.outputs += report.outputs
        self.stats = report.stats or self.stats

    def start_and_hold_first_step_of(self, requests: Sequence[Request]) -> None:
        """`let_go` ends the step. Without this a short answer could be over before the test's next line."""
        self.runner.may_go_on.clear()
        self.loop.start()
        self.loop.submit(requests)
        assert self.runner.has_begun.wait(TIMEOUT_S)

    def let_go(self) -> None:
        self.runner.may_go_on.set()

    def ends(self) -> dict[int, list[RequestOutput]]:
        ends: dict[int, list[RequestOutput]] = {}
        for output in self.outputs:
            if output.finish_reason is not None:
                ends.setdefault(output.request_id, []).append(output)
        return ends


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture(request.param)


def test_an_abort_that_overtakes_its_submit_leaves_no_ghost(fixture: Fixture) -> None:
    gone, stays = make_request(max_tokens=50), make_request(max_tokens=3)
    fixture.loop.abort([gone.request_id])
    fixture.loop.start()
    fixture.loop.submit([gone, stays])
    wait_until(lambda: stays.request_id in fixture.ends())
    wait_until(lambda: not fixture.engine.has_work)
    assert gone.request_id not in {output.request_id for output in fixture.outputs}
    # it was counted nowhere, so that the counters missed what the client's ledger had
    wait_until(lambda: (fixture.stats.num_finished, fixture.stats.num_cancelled) == (1, 1))
    assert fixture.loop.stop(TIMEOUT_S)


def test_an_exception_after_the_step_leaves_nobody_without_an_end(fixture: Fixture) -> None:
    # all three reach their last token in the same step, in which nothing can be decoded
    requests = [make_request(max_tokens=1) for _ in range(3)]
    fixture.tokenizer.is_broken = True
    fixture.loop.start()
    fixture.loop.submit(requests)
    wait_until(lambda: len(fixture.ends()) == 3)
    assert all(len(ends) == 1 for ends in fixture.ends().values())
    assert {ends[0].finish_reason for ends in fixture.ends().values()} == {FinishReason.ERROR}
    fixture.tokenizer.is_broken = False
    later = make_request(max_tokens=2)
    fixture.loop.submit([later])
    wait_until(lambda: later.request_id in fixture.ends())
    assert fixture.ends()[later.request_id][0].finish_reason is FinishReason.LENGTH
    assert fixture.loop.stop(TIMEOUT_S)
    fixture.engine.check_integrity()


def test_a_damaged_state_stops_the_engine_but_answers_everybody(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(max_tokens=200) for _ in range(6)]
    fixture.start_and_hold_first_step_of(requests)
    monkeypatch.setattr(fixture.engine._scheduler, "schedule", lambda *_: 1 / 0)
    monkeypatch.setattr(fixture.engine._scheduler, "finish", lambda *_: 1 / 0)
    fixture.let_go()
    wait_until(lambda: len(fixture.ends()) == 6)
    wait_until(lambda: not fixture.loop._thread.is_alive())
    with pytest.raises(EngineFailure, match="the engine has stopped"):
        fixture.loop.submit([make_request()])


def test_a_lost_gpu_stops_the_engine_and_its_heartbeat(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step failed alone, so that a process whose GPU computed nothing more took requests on, fast and healthy."""
    requests = [make_request(max_tokens=200) for _ in range(6)]

    def lose(output: SchedulerOutput) -> StepResult:
        raise DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr(fixture.runner, "submit" if isinstance(fixture.runner, HeldAheadRunner) else "execute", lose)
    fixture.loop.start()
    fixture.loop.submit(requests)
    wait_until(lambda: len(fixture.ends()) == 6)
    assert all(len(ends) == 1 and "illegal memory access" in str(ends[0].error) for ends in fixture.ends().values())
    wait_until(lambda: not fixture.loop._thread.is_alive())
    with pytest.raises(EngineFailure, match="the engine has stopped"):
        fixture.loop.submit([make_request()])
    fixture.engine.check_integrity()


def test_stop_ends_live_requests_and_those_that_come_too_late(fixture: Fixture) -> None:
    live, late = make_request(max_tokens=60), make_request()
    fixture.start_and_hold_first_step_of([live])
    stopper = threading.Thread(target=fixture.loop.stop, args=(TIMEOUT_S,))
    stopper.start()
    fixture.let_go()
    try:
        fixture.loop.submit([late])
        expected = {live.request_id, late.request_id}
    except EngineFailure:
        expected = {live.request_id}
    stopper.join(TIMEOUT_S)
    wait_until(lambda: set(fixture.ends()) == expected)


def test_the_watchdog_ends_everybody_loudly_when_nothing_can_be_scheduled(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fixture.engine._scheduler._planner, "_admit", lambda plan: None)
    waiting = [make_request() for _ in range(2)]
    fixture.loop.start()
    fixture.loop.submit(waiting)
    wait_until(lambda: len(fixture.ends()) == 2)
    errors = {str(ends[0].error) for ends in fixture.ends().values()}
    assert errors == {"the scheduler found no way to go on with this request"}
    assert "nothing can be scheduled though" in caplog.text
    assert fixture.loop.stop(TIMEOUT_S)


def test_a_paused_requests_deadline_wakes_an_idle_engine(fixture: Fixture) -> None:
    paused = make_request(max_tokens=200, deadline=time.monotonic() + 1.0)
    fixture.start_and_hold_first_step_of([paused])
    fixture.loop.pause([paused.request_id])
    fixture.let_go()
    wait_until(lambda: fixture.stats.num_paused == 1)
    assert not fixture.engine.has_work
    wait_until(lambda: paused.request_id in fixture.ends())
    assert fixture.ends()[paused.request_id][0].finish_reason is FinishReason.DEADLINE
    assert fixture.loop.stop(TIMEOUT_S)


def test_a_paused_request_goes_on_where_it_was_when_it_is_resumed(fixture: Fixture) -> None:
    request = make_request(max_tokens=100)
    fixture.start_and_hold_first_step_of([request])
    fixture.loop.pause([request.request_id])
    fixture.let_go()
    wait_until(lambda: fixture.stats.num_paused == 1)
    fixture.loop.resume([request.request_id])
    wait_until(lambda: request.request_id in fixture.ends())
    tokens = [token.token_id for output in fixture.outputs for token in output.tokens]
    assert tokens == expected_output(request.prompt_token_ids, 100)
    assert fixture.loop.stop(TIMEOUT_S)


def test_an_idle_engine_shows_that_it_is_there_and_one_in_a_step_does_not(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "HEARTBEAT_S", 0.01)
    fixture.loop.start()
    wait_until(lambda: fixture.stats.heartbeat_s > 0)
    earlier = fixture.stats.heartbeat_s
    wait_until(lambda: fixture.stats.heartbeat_s > earlier)
    fixture.runner.may_go_on.clear()
    fixture.loop.submit([make_request()])
    assert fixture.runner.has_begun.wait(TIMEOUT_S)
    in_step = fixture.stats.heartbeat_s
    time.sleep(0.1)
    assert fixture.stats.heartbeat_s == in_step
    fixture.let_go()
    wait_until(lambda: fixture.stats.heartbeat_s > in_step)
    assert fixture.loop.stop(TIMEOUT_S)


def test_a_heartbeat_alone_checks_nothing_that_takes_milliseconds(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "HEARTBEAT_S", 0.01)
    num_checks = 0
    check = fixture.engine.check_integrity

    def counted_check() -> None:
        nonlocal num_checks
        num_checks += 1
        check()

    monkeypatch.setattr(fixture.engine, "check_integrity", counted_check)
    fixture.loop.start()
    request = make_request(max_tokens=1)
    fixture.loop.submit([request])
    wait_until(lambda: request.request_id in fixture.ends())
    ended_s = fixture.stats.heartbeat_s
    wait_until(lambda: fixture.stats.heartbeat_s > ended_s + 0.1)
    assert num_checks == 1
    assert fixture.loop.stop(TIMEOUT_S)


def test_the_time_in_which_the_engine_was_in_a_step_counts_as_queue_time(fixture: Fixture) -> None:
    """It did not: a request was said to have arrived when the engine took it in, up to a step later."""
    first, second = make_request(max_tokens=1), make_request(max_tokens=1)
    fixture.start_and_hold_first_step_of([first])
    fixture.loop.submit([second])
    time.sleep(0.2)
    fixture.let_go()
    wait_until(lambda: len(fixture.ends()) == 2)
    timings = fixture.ends()[second.request_id][0].timings
    assert timings is not None
    assert timings.queue_s is not None
    assert timings.queue_s >= 0.2
    assert fixture.loop.stop(TIMEOUT_S)


def test_gauges_return_to_zero_after_a_mass_abort(fixture: Fixture) -> None:
    requests = [make_request(max_tokens=200) for _ in range(20)]
    fixture.start_and_hold_first_step_of(requests)
    fixture.loop.pause([requests[0].request_id])
    fixture.loop.abort([request.request_id for request in requests])
    fixture.let_go()
    # no request comes after them
    wait_until(lambda: len(fixture.ends()) == 20)
    wait_until(lambda: fixture.stats.num_cancelled == 20)
    stats = fixture.stats
    assert (stats.num_running, stats.num_waiting, stats.num_paused, stats.num_kv_blocks_held) == (0, 0, 0, 0)
    assert stats.num_failed == 20
    assert fixture.loop.stop(TIMEOUT_S)
