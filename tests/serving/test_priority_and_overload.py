"""Priority from every place where a client may put it, limits by class, and refusals in words of their own."""

import threading
from typing import Any

import pytest

from noria.config import PriorityClass
from support.fake_pb_utils import FakeRequest, TritonError
from support.fake_service import FakeService, error_of, text_of
from support.waiting import TIMEOUT_S, wait_until

TENSOR, PARAMETERS = {"sampling": {"max_tokens": 2, "priority": 1}}, {"parameters": {"max_tokens": 2, "priority": "1"}}
BESIDE = {"sampling": {"max_tokens": 2}, "parameters": {"priority": 1}}
TWICE = {"sampling": {"max_tokens": 2, "priority": "1"}, "parameters": {"priority": 1}}
ZERO_BESIDE = {"sampling": {"max_tokens": 2, "priority": 1}, "parameters": {"priority": 0}}


def note_end(request: FakeRequest, name: str, ends: list[str]) -> None:
    original = request.sender.send

    def send(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if request.sender.num_finals:
            ends.append(name)

    request.sender.send = send  # type: ignore[method-assign]


@pytest.mark.parametrize("inputs", [TENSOR, PARAMETERS, BESIDE, TWICE, ZERO_BESIDE])
def test_priority_is_read_from_the_tensor_and_from_the_requests_parameters(inputs: dict[str, Any]) -> None:
    service = FakeService("inflight", max_num_seqs=1)
    service.runner.gate.clear()
    first, ordinary = (service.request("a", sampling={"max_tokens": 2}) for _ in range(2))
    urgent = service.request("a", **inputs)
    ends: list[str] = []
    note_end(ordinary, "ordinary", ends)
    note_end(urgent, "urgent", ends)
    service.service.execute([first])
    wait_until(lambda: service.engine.stats().num_running == 1)
    service.service.execute([ordinary])
    service.service.execute([urgent])
    service.runner.gate.set()
    wait_until(lambda: len(ends) == 2)
    assert ends == ["urgent", "ordinary"]
    assert text_of(urgent.sender.responses) == "abc"
    service.service.close()


BAD = {
    "two places that differ": (
        {"sampling": {"priority": 1}, "parameters": {"priority": 2}},
        "priority is 1 in sampling_parameters and 2 among the request's parameters",
    ),
    "beyond the levels": (
        {"sampling": {"priority": 4}},
        "priority must be from 1 to 3, or 0 for the default (2), not 4",
    ),
    "beyond the levels, beside": (
        {"sampling": {}, "parameters": {"priority": 4}},
        "priority must be from 1 to 3, or 0",
    ),
    "negative": ({"parameters": {"priority": -1}}, "priority must be from 0 to"),
    "a word, beside": (
        {"sampling": {}, "parameters": {"priority": "high"}},
        "priority must be a whole number, not 'high'",
    ),
}


@pytest.mark.parametrize(("inputs", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_priority_is_refused_by_name_in_every_mode(
    any_mode: FakeService, inputs: dict[str, Any], message: str
) -> None:
    bad, good = any_mode.ask(any_mode.request("a", **inputs), any_mode.request("a", sampling={"max_tokens": 1}))
    assert error_of(bad).code() == TritonError.INVALID_ARG
    assert message in error_of(bad).message()
    assert text_of(good) == "ab"


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_a_class_has_limits_and_a_deadline_of_its_own(mode: str) -> None:
    classes = {1: PriorityClass(max_prompt_len=3, max_output_len=50, default_timeout_s=0.001)}
    service = FakeService(mode, priority_classes=classes)
    long, greedy = service.ask(
        service.request("abcd", sampling={"priority": 1, "max_tokens": 2}),
        service.request("a", sampling={"priority": 1, "max_tokens": 51}),
    )
    assert error_of(long).message() == "text_input has 4 tokens; requests of priority 1 may have at most 3"
    assert "from 1 to 50 for requests of priority 1" in error_of(greedy).message()
    assert error_of(long).code() == error_of(greedy).code() == TritonError.INVALID_ARG
    service.runner.gate.clear()
    threading.Timer(0.05, service.runner.gate.set).start()
    late, patient = service.ask(
        service.request("a", sampling={"priority": 1, "max_tokens": 50}),
        service.request("abcd", sampling={"max_tokens": 51}),
    )
    assert error_of(late).code() == TritonError.UNAVAILABLE
    assert "timeout passed" in error_of(late).message()
    assert len(text_of(patient)) == 55
    stats = service.engine.stats()
    assert (stats.num_failed, stats.num_expired, stats.num_rejected) == (1, 1, 0)
    service.service.close()


def test_a_full_class_is_refused_at_once_with_its_own_text_and_others_are_not() -> None:
    service = FakeService("inflight", max_num_seqs=1, priority_classes={3: PriorityClass(max_queue_size=1)})
    service.runner.gate.clear()
    running = service.request("a", sampling={"max_tokens": 2})
    waiting, refused = (service.request("a", sampling={"max_tokens": 2, "priority": 3}) for _ in range(2))
    other = service.request("a", sampling={"max_tokens": 2})
    service.service.execute([running])
    wait_until(lambda: service.engine.stats().num_running == 1)
    service.service.execute([waiting, refused, other])
    service.runner.gate.set()
    for request in (running, waiting, refused, other):
        wait_until(lambda request=request: request.sender.num_finals == 1)
    error = error_of(refused.sender.responses)
    assert error.code() == TritonError.UNAVAILABLE
    assert error.message().startswith("the waiting queue is full: max_queue_size of priority 3 is 1 requests; ")
    assert error.message().endswith("try again later")
    assert [text_of(request.sender.responses) for request in (running, waiting, other)] == ["abc"] * 3
    stats = service.engine.stats()
    assert (stats.num_failed, stats.num_rejected, stats.num_expired) == (1, 1, 0)
    service.service.close()


def test_cancellation_is_counted_as_a_failure(inflight: FakeService) -> None:
    inflight.runner.gate.clear()
    request = inflight.request("a", sampling={"max_tokens": 100}, stream=True)
    request.sender.cancelled = True
    thread = threading.Thread(target=inflight.service.execute, args=([request],))
    thread.start()
    wait_until(lambda: request.sender.num_finals == 1)
    inflight.runner.gate.set()
    thread.join(TIMEOUT_S)
    wait_until(lambda: inflight.engine.stats().num_failed == 1)
    assert inflight.engine.stats().num_cancelled == 1
