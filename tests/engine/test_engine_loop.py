"""The engine's thread: nobody is left without a last output, whatever goes wrong, in whatever order commands come."""

import threading
from collections.abc import Sequence

import pytest

from noria.engine.engine import Engine
from noria.engine.engine_loop import EngineLoop
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import RequestOutput, StepReport
from noria.errors import EngineFailure
from noria.sequence import FinishReason
from support.byte_tokenizer import ByteTokenizer
from support.engines import HashRunner, make_request, make_scheduler
from support.waiting import TIMEOUT_S, wait_until


class BrokenTokenizer(ByteTokenizer):
    """Cannot decode while it is broken."""

    is_broken = False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.is_broken:
            raise RuntimeError("cannot decode")
        return super().decode(token_ids, skip_special_tokens)


class Fixture:
    def __init__(self) -> None:
        self.tokenizer = BrokenTokenizer()
        self.engine = Engine(make_scheduler(), HashRunner(64, 4), self.tokenizer, StatsCounter(64, 4))
        self.outputs: list[RequestOutput] = []
        self.loop = EngineLoop(self.engine, self._deliver)

    def _deliver(self, report: StepReport) -> None:
        self.outputs += report.outputs

    def ends(self) -> dict[int, list[RequestOutput]]:
        ends: dict[int, list[RequestOutput]] = {}
        for output in self.outputs:
            if output.finish_reason is not None:
                ends.setdefault(output.request_id, []).append(output)
        return ends


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_an_abort_that_overtakes_its_submit_leaves_no_ghost(fixture: Fixture) -> None:
    gone, stays = make_request(max_tokens=50), make_request(max_tokens=3)
    fixture.loop.abort([gone.request_id])
    fixture.loop.start()
    fixture.loop.submit([gone, stays])
    wait_until(lambda: stays.request_id in fixture.ends())
    wait_until(lambda: not fixture.engine.has_work)
    assert gone.request_id not in {output.request_id for output in fixture.outputs}
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
    fixture.loop.start()
    fixture.loop.submit(requests)
    wait_until(lambda: bool(fixture.outputs))
    monkeypatch.setattr(fixture.engine._scheduler, "schedule", lambda: 1 / 0)
    monkeypatch.setattr(fixture.engine._scheduler, "finish", lambda *_: 1 / 0)
    wait_until(lambda: len(fixture.ends()) == 6)
    wait_until(lambda: not fixture.loop._thread.is_alive())
    with pytest.raises(EngineFailure, match="the engine has stopped"):
        fixture.loop.submit([make_request()])


def test_stop_ends_live_requests_and_those_that_come_too_late(fixture: Fixture) -> None:
    live, late = make_request(max_tokens=60), make_request()
    fixture.loop.start()
    fixture.loop.submit([live])
    wait_until(lambda: bool(fixture.outputs))
    stopper = threading.Thread(target=fixture.loop.stop, args=(TIMEOUT_S,))
    stopper.start()
    try:
        fixture.loop.submit([late])
        expected = {live.request_id, late.request_id}
    except EngineFailure:
        expected = {live.request_id}
    stopper.join(TIMEOUT_S)
    wait_until(lambda: set(fixture.ends()) == expected)
