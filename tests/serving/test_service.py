"""The serving layer over an engine without weights: contract, errors, cancellation, endings. Triton is faked."""

import itertools
import json
import threading
import time
from typing import Any

import pytest

from noria.engine.outputs import RequestOutput
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.sequence import Request
from noria.serving.held_replies import HeldReplies
from noria.serving.reply import Reply, ReplyOptions
from noria.serving.response_writer import ResponseWriter
from support.fake_pb_utils import InferenceRequest, TritonError
from support.fake_service import FakeService, error_of, flat, text_of
from support.waiting import TIMEOUT_S, wait_until


def test_one_answer_with_the_prompt_before_it(any_mode: FakeService) -> None:
    (responses,) = any_mode.ask(any_mode.request("a", sampling={"max_tokens": 3}))
    assert [flat(response.value("text_output")) for response in responses] == [b"abcd"]
    assert len(responses[0].output_tensors()) == 1


def test_the_prompt_is_left_out_on_request(any_mode: FakeService) -> None:
    (responses,) = any_mode.ask(any_mode.request("a", sampling={"max_tokens": 3}, exclude_input_in_output=True))
    assert text_of(responses) == "bcd"


def test_max_tokens_is_16_unless_given(any_mode: FakeService) -> None:
    (responses,) = any_mode.ask(any_mode.request("a"))
    assert text_of(responses) == "abcdefghijklmnopq"


def test_a_stream_sends_deltas_and_the_last_one_says_why_it_ended(any_mode: FakeService) -> None:
    request = any_mode.request("a", sampling={"max_tokens": 4}, stream=True, return_finish_reason=True)
    (responses,) = any_mode.ask(request)
    assert text_of(responses) == "bcde"
    assert [flat(response.value("finish_reason")) for response in responses[:-1]] == [b"None"] * (len(responses) - 1)
    assert flat(responses[-1].value("finish_reason")) == b"length"


@pytest.mark.parametrize("mode", ["inflight", "dynamic"])
def test_with_a_stream_interval_an_answer_comes_in_few_responses(mode: str) -> None:
    service = FakeService(mode, stream_interval=8)
    try:
        request = service.request("a", sampling={"max_tokens": 20}, stream=True, return_num_output_tokens=True)
        (responses,) = service.ask(request)
    finally:
        service.service.close()
    assert text_of(responses) == "bcdefghijklmnopqrstu"
    counts = [flat(response.value("num_output_tokens")) for response in responses]
    assert sum(counts) == 20
    # the first, two of eight, the rest
    assert len(responses) <= 4
    assert all(count >= 8 for count in counts[1:-1])


def test_what_a_stream_has_goes_ahead_of_its_error() -> None:
    """With a stream interval, up to so many tokens less one were lost to whoever's answer failed."""
    service = FakeService("inflight", stream_interval=100)
    execute, num_steps = service.runner.execute, itertools.count()

    def fail_at_last(output: SchedulerOutput) -> StepResult:
        if next(num_steps) == 6:
            raise RuntimeError("the device is gone")
        return execute(output)

    service.runner.execute = fail_at_last  # type: ignore[method-assign]
    try:
        (responses,) = service.ask(service.request("a", sampling={"max_tokens": 20}, stream=True))
    finally:
        service.service.close()
    assert text_of(responses[:-1]) == "bcdefg"
    assert "the device is gone" in responses[-1].error().message()


def test_text_that_cannot_be_made_does_not_cost_the_end() -> None:
    """When all is closed, one stream whose text could not be made cost those after it their FINAL."""

    def fail(token_id: int) -> str:
        raise ValueError("no such token")

    held = HeldReplies(2**20, 30.0, pause=lambda ids: None, resume=lambda ids: None)
    writer = ResponseWriter(lambda ids: None, held, stream_interval=100, is_unloading=lambda: False, decode_token=fail)
    sinks = [FinalSink() for _ in range(3)]
    for number, sink in enumerate(sinks):
        options = ReplyOptions(is_streamed=True, returns_logprobs=True)
        request = Request(number, (1,), SamplingParams(), seed=0)
        reply = Reply(options, [request], [""], 1)
        # a first chunk has gone, and a token waits for more
        reply.pop_chunk()
        reply.take(RequestOutput(number, "a", (SampledToken(7, -0.5, rank=1),)))
        writer.register(reply, sink)
    writer.start()
    assert writer.stop(TIMEOUT_S)
    assert [sink.num_finals for sink in sinks] == [1, 1, 1]


class FinalSink:
    def __init__(self) -> None:
        self.num_finals = 0

    def send(self, response: Any, num_bytes: int, is_final: bool) -> None:
        self.num_finals += is_final

    def is_cancelled(self) -> bool:
        return False


def test_the_optional_outputs_count_and_score_what_they_say(any_mode: FakeService) -> None:
    names = ("return_num_input_tokens", "return_num_output_tokens", "return_cumulative_logprob", "return_logprobs")
    sampling = {"max_tokens": 3, "logprobs": 2}
    (responses,) = any_mode.ask(any_mode.request("xa", sampling=sampling, stream=True, **dict.fromkeys(names, True)))
    assert {flat(response.value("num_input_tokens")) for response in responses} == {2}
    assert sum(flat(response.value("num_output_tokens")) for response in responses) == 3
    assert flat(responses[-1].value("cumulative_logprob")) == -1.5
    tokens = [entry for response in responses for entry in json.loads(flat(response.value("logprobs")))]
    assert tokens[0] == {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "32": {"logprob": -1.5, "rank": 2, "decoded_token": " "},
    }
    assert [next(iter(entry)) for entry in tokens] == ["98", "99", "100"]


def test_a_stop_string_is_never_shown_in_part(any_mode: FakeService) -> None:
    sampling = {"max_tokens": 20, "stop": ["fgx", "ijk"]}
    request = any_mode.request("a", sampling=sampling, stream=True, return_finish_reason=True)
    (responses,) = any_mode.ask(request)
    assert text_of(responses) == "bcdefgh"
    assert all(flat(response.value("text_output")) for response in responses[:-1])
    assert flat(responses[-1].value("finish_reason")) == b"stop"


def test_n_answers_come_side_by_side(any_mode: FakeService) -> None:
    (responses,) = any_mode.ask(any_mode.request("a", sampling={"max_tokens": 2, "n": 3}, exclude_input_in_output=True))
    texts = responses[0].value("text_output")
    assert texts == ([[b"bc"] * 3] if any_mode.is_batched else [b"bc"] * 3)


def test_parameters_of_the_request_stand_in_for_the_tensor_and_unknown_ones_are_ignored(any_mode: FakeService) -> None:
    (responses,) = any_mode.ask(any_mode.request("a", parameters={"max_tokens": "2", "id": "7", "priority": 1}))
    assert text_of(responses) == "abc"


def test_several_prompts_in_one_request_are_one_batch() -> None:
    fixture = FakeService("static")
    request = fixture.request("a", "m", "x", sampling={"max_tokens": 2}, exclude_input_in_output=True)
    (responses,) = fixture.ask(request)
    assert responses[0].value("text_output") == [[b"bc"], [b"no"], [b"yz"]]
    stats = fixture.engine.stats()
    assert (stats.num_steps, stats.num_rows) == (2, 6)
    fixture.service.close()


def test_execute_returns_at_once_in_flight_and_after_the_batch_when_closed() -> None:
    for mode, returns_early in (("inflight", True), ("static", False)):
        fixture = FakeService(mode)
        fixture.runner.gate.clear()
        request = fixture.request("a", sampling={"max_tokens": 2})
        thread = threading.Thread(target=fixture.service.execute, args=([request],))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() != returns_early
        fixture.runner.gate.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        fixture.service.close()
        assert request.sender.num_finals == 1


def test_a_model_that_is_not_decoupled_returns_its_responses_in_order() -> None:
    fixture = FakeService("dynamic", is_decoupled=False)
    requests = [
        fixture.request("a", sampling={"max_tokens": 2}),
        fixture.request("a", sampling={"max_tokens": 0}),
        fixture.request("m", sampling={"max_tokens": 1}),
        fixture.request("m", stream=True),
    ]
    responses = fixture.service.execute(requests)
    assert responses is not None
    assert [flat(responses[index].value("text_output")) for index in (0, 2)] == [b"abc", b"mn"]
    assert responses[1].error().code() == responses[3].error().code() == TritonError.INVALID_ARG
    assert responses[3].error().message().startswith("stream must be false")
    fixture.service.close()


BAD_REQUESTS = {
    "empty text": (("",), {}, "text_input must not be empty"),
    "not UTF-8": ((b"a\xff",), {}, "text_input is not valid UTF-8: invalid start byte at byte 1"),
    "too long for the model": (("a" * 128,), {}, "text_input has 128 tokens; this model takes at most 127"),
    "far too long": (("a" * 2**16,), {}, "text_input must have at most 32768 bytes, not 65536"),
    "prompt and output too long": (("a" * 100,), {"sampling": {"max_tokens": 29}}, "max_tokens must be from 1 to 28"),
    "max_tokens 0": (("a",), {"sampling": {"max_tokens": 0}}, "max_tokens must be from 1 to"),
    "max_tokens negative": (("a",), {"sampling": {"max_tokens": -1}}, "max_tokens must be from 1 to"),
    "max_tokens huge": (("a",), {"sampling": {"max_tokens": 2**70}}, "max_tokens must be from 1 to"),
    "max_tokens a word": (
        ("a",),
        {"sampling": {"max_tokens": "many"}},
        "max_tokens must be a whole number, not 'many'",
    ),
    "max_tokens a list": (("a",), {"sampling": {"max_tokens": [1]}}, "max_tokens must be a whole number"),
    "half a character in cache_salt": (
        ("a",),
        {"sampling": b'{"cache_salt": "\\ud800"}'},
        "cache_salt is not valid Unicode: surrogates not allowed at character 0",
    ),
    "user is a number": (("a",), {"sampling": b'{"user": 7}'}, "user must be a string, not 7"),
    "temperature NaN": (("a",), {"sampling": b'{"temperature": NaN}'}, "temperature must be a finite number, not nan"),
    "temperature negative": (("a",), {"sampling": {"temperature": -0.1}}, "temperature must be from 0.0 to 100.0"),
    "top_p 0": (("a",), {"sampling": {"top_p": 0}}, "top_p must be above 0"),
    "malformed JSON": (("a",), {"sampling": b"{"}, "sampling_parameters is not valid JSON"),
    "JSON that is no object": (("a",), {"sampling": b"[1]"}, "sampling_parameters must be a JSON object, not list"),
    "deeply nested JSON": (("a",), {"sampling": b"[" * 100_000}, "sampling_parameters is not valid JSON"),
    "unknown key": (
        ("a",),
        {"sampling": {"max_token": 1}},
        "unknown sampling parameter 'max_token'; valid are max_tok",
    ),
    "token id outside": (
        ("a",),
        {"sampling": {"stop_token_ids": [260]}},
        "stop_token_ids must be from 0 to 259, not 260",
    ),
    "token id negative": (
        ("a",),
        {"sampling": {"stop_token_ids": [-1]}},
        "stop_token_ids must be from 0 to 259, not -1",
    ),
    "too many stop strings": (
        ("a",),
        {"sampling": {"stop": ["x"] * 10_000}},
        "stop takes at most 64 strings, not 10000",
    ),
    "empty stop string": (("a",), {"sampling": {"stop": [""]}}, "each stop string must have 1 to 1024 characters"),
    "too many logprobs": (("a",), {"sampling": {"logprobs": 21}}, "logprobs must be from 0 to 20"),
    "n too large": (("a",), {"sampling": {"n": 10_000}}, "n must be from 1 to 64"),
    "min over max": (("a",), {"sampling": {"min_tokens": 5, "max_tokens": 4}}, "min_tokens must be at most max_tokens"),
    "prompt in a stream": (
        ("a",),
        {"stream": True, "exclude_input_in_output": False},
        "exclude_input_in_output must be",
    ),
    "bad request parameter": (("a",), {"parameters": {"top_k": "x"}}, "top_k must be a whole number, not 'x'"),
    "timeout a word": (("a",), {"parameters": {"timeout": "soon"}}, "timeout must be from 0 to"),
    "timeout true": (("a",), {"parameters": {"timeout": True}}, "timeout must be from 0 to"),
    "timeout a fraction": (("a",), {"parameters": {"timeout": 0.5}}, "timeout must be from 0 to"),
    "timeout endless": (("a",), {"parameters": {"timeout": "1" + "0" * 320}}, "timeout must be from 0 to"),
    "repetition penalty tiny": (
        ("a",),
        {"sampling": {"repetition_penalty": 1e-38}},
        "repetition_penalty must be from 0.01",
    ),
}


@pytest.mark.parametrize(("texts", "inputs", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_bad_request_is_answered_by_name_and_its_neighbours_go_on(
    any_mode: FakeService, texts: tuple[Any, ...], inputs: dict[str, Any], message: str
) -> None:
    good = [any_mode.request(letter, sampling={"max_tokens": 2}) for letter in "ax"]
    first, bad, last = any_mode.ask(good[0], any_mode.request(*texts, **inputs), good[1])
    assert (text_of(first), text_of(last)) == ("abc", "xyz")
    assert message in error_of(bad).message()
    assert error_of(bad).code() == TritonError.INVALID_ARG


@pytest.mark.parametrize("name", ["image", "embedding_request"])
def test_what_the_model_cannot_do_is_unsupported(any_mode: FakeService, name: str) -> None:
    (responses,) = any_mode.ask(any_mode.request("a", **{name: b"x"}))
    assert error_of(responses).code() == TritonError.UNSUPPORTED
    assert error_of(responses).message().startswith(f"{name}: ")


def test_a_cancelled_request_frees_its_blocks_and_its_neighbour_goes_on(any_mode: FakeService) -> None:
    any_mode.runner.gate.clear()
    leaver = any_mode.request("a", sampling={"max_tokens": 100}, stream=True)
    stayer = any_mode.request("a", sampling={"max_tokens": 100})
    leaver.sender.cancelled = True
    thread = threading.Thread(target=any_mode.service.execute, args=([leaver, stayer],))
    thread.start()
    wait_until(lambda: leaver.sender.num_finals == 1)
    any_mode.runner.gate.set()
    thread.join(TIMEOUT_S)
    wait_until(lambda: stayer.sender.num_finals == 1)
    assert leaver.sender.responses[-1].error().code() == TritonError.CANCELLED
    assert len(text_of(stayer.sender.responses)) == 101
    wait_until(lambda: any_mode.engine.stats().num_kv_blocks_held == 0)


def test_a_timeout_is_unavailable_in_its_own_words(any_mode: FakeService) -> None:
    any_mode.runner.gate.clear()
    request = any_mode.request("a", sampling={"max_tokens": 100}, timeout_us=1000)
    threading.Timer(0.05, any_mode.runner.gate.set).start()
    (responses,) = any_mode.ask(request)
    assert responses[-1].error().code() == TritonError.UNAVAILABLE
    assert "timeout passed" in responses[-1].error().message()


def test_a_full_queue_is_unavailable_at_once() -> None:
    fixture = FakeService("inflight", max_num_seqs=1, max_queue_size=1)
    fixture.runner.gate.clear()
    running, waiting, refused = (fixture.request("a", sampling={"max_tokens": 5}) for _ in range(3))
    fixture.service.execute([running])
    wait_until(lambda: fixture.engine.stats().num_running == 1)
    fixture.service.execute([waiting, refused])
    fixture.runner.gate.set()
    for request in (running, waiting, refused):
        wait_until(lambda request=request: request.sender.num_finals == 1)
    assert error_of(refused.sender.responses).code() == TritonError.UNAVAILABLE
    assert "max_queue_size is 1" in error_of(refused.sender.responses).message()
    assert text_of(waiting.sender.responses) == "abcdef"
    fixture.service.close()


def test_a_failed_step_fails_its_requests_and_later_ones_are_served(any_mode: FakeService) -> None:
    any_mode.runner.failure = RuntimeError("out of memory")
    (responses,) = any_mode.ask(any_mode.request("a"))
    assert error_of(responses).code() == TritonError.INTERNAL
    assert "out of memory" in error_of(responses).message()
    any_mode.runner.failure = None
    (responses,) = any_mode.ask(any_mode.request("a", sampling={"max_tokens": 1}))
    assert text_of(responses) == "ab"


def test_a_client_that_cannot_be_reached_loses_only_its_own_reply(inflight: FakeService) -> None:
    broken = inflight.request("a", sampling={"max_tokens": 50}, stream=True)
    broken.sender.is_broken = True
    _, good = inflight.ask(broken, inflight.request("a", sampling={"max_tokens": 50}))
    assert len(text_of(good)) == 51
    wait_until(lambda: inflight.engine.stats().num_kv_blocks_held == 0)


@pytest.mark.parametrize("how", ["close", "unload"])
def test_an_unload_ends_open_streams_with_an_error_and_final(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = FakeService("inflight")
    fixture.runner.gate.clear()
    requests = [fixture.request("a", sampling={"max_tokens": 100}, stream=True) for _ in range(6)]
    fixture.service.execute(requests)
    if how == "unload":
        monkeypatch.setattr(InferenceRequest, "answer", "Model 'llm' is not ready.")
        for request in requests:
            wait_until(lambda request=request: request.sender.num_finals == 1)
    fixture.runner.gate.set()
    fixture.service.close()
    for request in requests:
        assert request.sender.num_finals == 1
        assert request.sender.responses[-1].error().message() == "the model is being unloaded"
    assert fixture.engine.stats().num_kv_blocks_held == 0


def test_chunks_pile_up_into_one_response_when_the_client_is_slow(inflight: FakeService) -> None:
    request = inflight.request("a", sampling={"max_tokens": 60}, stream=True)
    original = request.sender.send

    def slow_send(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        original(*args, **kwargs)

    request.sender.send = slow_send  # type: ignore[method-assign]
    (responses,) = inflight.ask(request)
    assert len(responses) < 60
    assert text_of(responses) == "".join(chr(ord("a") + index % 26) for index in range(1, 61))
