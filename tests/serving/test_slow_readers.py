"""Triton takes no more of one reply: what waits is bounded, the request is paused, then given up; nobody else notices.

The sender behaves as tritonserver 2.51's does when /dev/shm is full, see `noria.serving.sinks`.
"""

import threading
import time
from typing import Any

import pytest

from noria.engine.outputs import RequestOutput
from noria.scheduler_output import SchedulerOutput, StepResult
from noria.sequence import FinishReason
from noria.serving import sinks
from noria.serving.held_replies import RETRY_S, HeldReplies
from noria.serving.reply import Reply, ReplyOptions
from support.engines import make_request
from support.fake_pb_utils import FakeRequest, FakeSender, InferenceRequest, InferenceResponse, TritonError
from support.fake_service import FakeService, error_of, flat, text_of
from support.waiting import TIMEOUT_S, wait_until

FULL = "Failed to increase the shared memory pool size for key 'region' to 1048576 bytes."
CLOSED = "Unable to send response. Response sender has been closed."


class FullSender(FakeSender):
    """Refuses whatever has outputs while it is full. What was refused with FINAL has closed it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = threading.Event()
        self.is_full.set()
        self.num_refused = 0
        self.is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.is_closed:
            raise TritonError(CLOSED)
        if self.is_full.is_set() and response is not None and response.output_tensors():
            self.num_refused += 1
            self.is_closed = bool(flags)
            raise TritonError(FULL)
        super().send(response, flags)


def slow_request(service: FakeService, max_tokens: int = 100, **inputs: Any) -> tuple[FakeRequest, FullSender]:
    request = service.request("a", sampling={"max_tokens": max_tokens}, **({"stream": True} | inputs))
    request.sender = sender = FullSender()
    return request, sender


def slow_down(service: FakeService) -> None:
    """2 ms a step, so that the writer sees each."""
    execute = service.runner.execute

    def slow_execute(output: SchedulerOutput) -> StepResult:
        time.sleep(0.002)
        return execute(output)

    service.runner.execute = slow_execute  # type: ignore[method-assign]


def alphabet(num_letters: int) -> str:
    return "".join(chr(ord("a") + index % 26) for index in range(1, num_letters + 1))


def test_what_was_refused_comes_later_whole_and_in_order_and_a_neighbour_does_not_wait_for_it(
    any_mode: FakeService,
) -> None:
    slow_down(any_mode)
    slow, sender = slow_request(any_mode)
    other = any_mode.request("a", sampling={"max_tokens": 50}, stream=True)
    thread = threading.Thread(target=any_mode.service.execute, args=([slow, other],))
    thread.start()
    wait_until(lambda: other.sender.num_finals == 1 and sender.num_refused > 0)
    assert sender.responses == []
    sender.is_full.clear()
    wait_until(lambda: sender.num_finals == 1)
    thread.join(TIMEOUT_S)
    assert text_of(other.sender.responses) == alphabet(50)
    assert text_of(sender.responses) == alphabet(100)


def test_a_request_whose_text_piles_up_is_paused_without_blocks_and_goes_on_where_it_was() -> None:
    service = FakeService("inflight", max_unsent_bytes=10)
    slow_down(service)
    slow, sender = slow_request(service)
    service.service.execute([slow])
    wait_until(lambda: service.engine.stats().num_paused == 1)
    assert service.engine.stats().num_kv_blocks_held == 0
    (responses,) = service.ask(service.request("m", sampling={"max_tokens": 3}))
    assert text_of(responses) == "mnop"
    assert service.engine.stats().num_generated_tokens < 100
    sender.is_full.clear()
    wait_until(lambda: sender.num_finals == 1)
    assert text_of(sender.responses) == alphabet(100)
    assert service.engine.stats().num_paused == 0
    service.service.close()


def test_one_that_stays_behind_is_given_up_with_an_error_of_its_own() -> None:
    service = FakeService("inflight", max_unsent_bytes=10, slow_reader_timeout_s=0.05)
    slow_down(service)
    slow, sender = slow_request(service, n=1)
    service.service.execute([slow])
    wait_until(lambda: sender.num_finals == 1)
    error = error_of(sender.responses)
    assert error.code() == TritonError.UNAVAILABLE
    assert error.message().startswith("the answer was not taken for 0.05 s: the client reads too slowly")
    wait_until(lambda: service.engine.stats().num_failed == 1)
    stats = service.engine.stats()
    assert (stats.num_paused, stats.num_running, stats.num_kv_blocks_held) == (0, 0, 0)
    service.service.close()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_large_end_goes_ahead_of_final_so_that_it_can_be_offered_again(
    is_streamed: bool, any_mode: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES_WITH_FINAL", 50)
    slow, sender = slow_request(any_mode, stream=is_streamed, return_finish_reason=True, exclude_input_in_output=True)
    thread = threading.Thread(target=any_mode.service.execute, args=([slow],))
    thread.start()
    # held by nobody any more: the engine is done with it
    wait_until(lambda: any_mode.engine.stats().num_finished == 1 and sender.num_refused > 1)
    sender.is_full.clear()
    wait_until(lambda: sender.num_finals == 1)
    thread.join(TIMEOUT_S)
    assert text_of(sender.responses) == alphabet(100)
    assert flat(sender.responses[-1].value("finish_reason")) == b"length"


def test_an_end_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES_WITH_FINAL", 50)
    service = FakeService("inflight", slow_reader_timeout_s=0.05)
    slow, sender = slow_request(service, stream=False)
    service.service.execute([slow])
    wait_until(lambda: sender.num_finals == 1)
    assert error_of(sender.responses).code() == TritonError.UNAVAILABLE
    service.service.close()


def test_a_deadline_does_not_wait_for_what_was_refused() -> None:
    service = FakeService("inflight", max_unsent_bytes=10)
    slow_down(service)
    slow, sender = slow_request(service, timeout_us=300_000)
    service.service.execute([slow])
    wait_until(lambda: service.engine.stats().num_paused == 1)
    wait_until(lambda: sender.num_finals == 1)
    assert "timeout passed" in error_of(sender.responses).message()
    service.service.close()


@pytest.mark.parametrize("how", ["cancel", "unload", "close"])
def test_a_held_reply_can_be_cancelled_and_unloaded(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService("inflight", max_unsent_bytes=10)
    slow_down(service)
    slow_down(service)
    slow, sender = slow_request(service)
    service.service.execute([slow])
    wait_until(lambda: service.engine.stats().num_paused == 1)
    if how == "cancel":
        sender.cancelled = True
        wait_until(lambda: sender.num_finals == 1)
    elif how == "unload":
        monkeypatch.setattr(InferenceRequest, "answer", "Model 'llm' is not ready.")
        wait_until(lambda: sender.num_finals == 1)
    service.service.close()
    code = TritonError.CANCELLED if how == "cancel" else TritonError.INTERNAL
    assert error_of(sender.responses).code() == code
    assert service.engine.stats().num_paused == 0
    service.engine.check_integrity()


class HoldFixture:
    """A reply of one part, and what became of it."""

    def __init__(self, **options: Any) -> None:
        self.request = make_request()
        self.reply = Reply(ReplyOptions(is_streamed=True, **options), [self.request], ["prompt"], n=1)
        self.calls: list[tuple[str, list[int]]] = []
        self.held = HeldReplies(
            10,
            5.0,
            pause=lambda request_ids: self.calls.append(("pause", list(request_ids))),
            resume=lambda request_ids: self.calls.append(("resume", list(request_ids))),
        )

    def take(self, text: str, reason: FinishReason | None = None) -> None:
        self.reply.take(RequestOutput(self.request.request_id, text, finish_reason=reason))


def test_up_to_the_bound_nothing_is_paused_and_nothing_is_overdue() -> None:
    fixture = HoldFixture()
    fixture.take("0123456789")
    fixture.held.hold(fixture.reply, 0, now=0.0)
    assert not fixture.held.is_overdue(fixture.reply, now=1000.0)
    fixture.held.release(fixture.reply)
    assert fixture.calls == []


def test_above_it_the_clock_runs_from_the_moment_it_was_found_until_all_was_taken() -> None:
    fixture = HoldFixture()
    fixture.held.hold(fixture.reply, 0, now=0.0)
    # two bytes a character
    fixture.take("éééééé")
    fixture.held.check_bound(fixture.reply, now=1.0)
    fixture.held.hold(fixture.reply, 0, now=2.0)
    ids = [fixture.request.request_id]
    assert fixture.calls == [("pause", ids)]
    assert not fixture.held.is_overdue(fixture.reply, now=5.9)
    assert fixture.held.is_overdue(fixture.reply, now=6.0)
    fixture.held.release(fixture.reply)
    assert fixture.calls == [("pause", ids), ("resume", ids)]
    assert not fixture.held.is_overdue(fixture.reply, now=6.0)
    assert fixture.reply not in fixture.held


def test_what_was_refused_counts_with_what_waits_behind_it() -> None:
    fixture = HoldFixture()
    fixture.held.hold(fixture.reply, 8, now=0.0)
    fixture.take("01")
    fixture.held.check_bound(fixture.reply, now=1.0)
    assert fixture.calls == []
    fixture.take("2")
    fixture.held.check_bound(fixture.reply, now=2.0)
    assert fixture.calls == [("pause", [fixture.request.request_id])]


def test_it_is_offered_again_after_a_while_and_no_sooner() -> None:
    fixture = HoldFixture()
    assert not fixture.held.is_due(fixture.reply, now=0.0)
    fixture.held.hold(fixture.reply, 0, now=1.0)
    assert not fixture.held.is_due(fixture.reply, now=1.0 + RETRY_S / 2)
    assert fixture.held.is_due(fixture.reply, now=1.0 + RETRY_S)


def test_an_ended_reply_is_not_paused_but_can_be_overdue() -> None:
    fixture = HoldFixture()
    fixture.take("01234567890123456789", FinishReason.LENGTH)
    fixture.held.hold(fixture.reply, 0, now=0.0)
    assert fixture.calls == []
    assert fixture.held.is_overdue(fixture.reply, now=5.0)
