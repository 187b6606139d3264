"""Bad input on the real server: an error that names the field, and nothing else is lost."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from noria.serving.server import RunningServer
from support.raw_triton import RawStream, text_inputs
from support.server_figures import figures

PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 6, "temperature": 0}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": (text_inputs(""), "text_input must not be empty"),
    "not UTF-8": (text_inputs(b"caf\xe9 au lait"), "text_input is not valid UTF-8"),
    "prompt longer than the model": (text_inputs("word " * 9000), "tokens; this model takes at most 8191"),
    "prompt of a megabyte and more": (text_inputs("a" * 3_000_000), "text_input must have at most"),
    "max_tokens 0": (text_inputs(PROMPT, {"max_tokens": 0}), "max_tokens must be from 1"),
    "max_tokens -3": (text_inputs(PROMPT, {"max_tokens": -3}), "max_tokens must be from 1"),
    "max_tokens huge": (text_inputs(PROMPT, {"max_tokens": 10**30}), "max_tokens must be from 1"),
    "max_tokens over the model": (text_inputs(PROMPT, {"max_tokens": 9000}), "max_tokens must be from 1 to 8187"),
    "max_tokens a word": (text_inputs(PROMPT, {"max_tokens": "ten"}), "max_tokens must be a whole number, not 'ten'"),
    "half a character in cache_salt": (
        text_inputs(PROMPT, b'{"cache_salt": "\\ud800"}'),
        "cache_salt is not valid Unicode",
    ),
    "temperature NaN": (text_inputs(PROMPT, b'{"temperature": NaN}'), "temperature must be a finite number"),
    "temperature negative": (text_inputs(PROMPT, {"temperature": -1}), "temperature must be from 0.0 to 100.0, not -1"),
    "malformed JSON": (text_inputs(PROMPT, b"{max_tokens: 3}"), "sampling_parameters is not valid JSON"),
    "sampling parameters not UTF-8": (text_inputs(PROMPT, b"\xff\xfe"), "sampling_parameters is not valid UTF-8"),
    "unknown key": (text_inputs(PROMPT, {"beam_width": 4}), "unknown sampling parameter 'beam_width'"),
    "priority beyond the levels": (text_inputs(PROMPT, {"priority": 4}), "priority must be from 1 to 3, or 0 for the"),
    "priority a word": (text_inputs(PROMPT, {"priority": "high"}), "priority must be a whole number, not 'high'"),
    "wrong type": (text_inputs(PROMPT, {"ignore_eos": "maybe"}), "ignore_eos must be true or false"),
    "token id outside": (text_inputs(PROMPT, {"stop_token_ids": [49152]}), "stop_token_ids must be from 0 to 49151"),
    "10,000 stop strings": (text_inputs(PROMPT, {"stop": ["x"] * 10_000}), "stop takes at most 64 strings, not 10000"),
    "prompt in a stream": (
        text_inputs(PROMPT, stream=True, exclude_input_in_output=False),
        "exclude_input_in_output must be true",
    ),
    "image": (text_inputs(PROMPT, image=b"..."), "image: this model takes text only"),
    "embedding": (text_inputs(PROMPT, embedding_request=b"{}"), "embedding_request: this model takes text only"),
}


@pytest.fixture
def neighbour(any_mode: RunningServer) -> Iterator[RawStream]:
    """A request that is under way while bad ones come, and must not notice."""
    stream = RawStream(
        any_mode.grpc_url, text_inputs(PROMPT, GREEDY | {"max_tokens": 40, "ignore_eos": True}, stream=True)
    )
    first = stream.next()
    yield stream
    rest = stream.all()
    assert first.error is None
    assert all(response.error is None for response in rest)
    assert rest[-1].is_final


def test_each_bad_request_is_answered_by_name(any_mode: RunningServer, neighbour: RawStream) -> None:
    # all are sent before any is read: static takes half a second to form a batch
    streams = {name: RawStream(any_mode.grpc_url, inputs) for name, (inputs, _) in BAD.items()}
    answers = {name: stream.all() for name, stream in streams.items()}
    assert {name: len(responses) for name, responses in answers.items()} == dict.fromkeys(BAD, 1)
    wrong = {name: answer for name, (answer,) in answers.items() if BAD[name][1] not in (answer.error or "")}
    assert not wrong
    (after,) = RawStream(any_mode.grpc_url, text_inputs(PROMPT, GREEDY)).all()
    assert "Paris" in after.outputs["text_output"][0]


def test_a_missing_or_mistyped_tensor_is_refused_by_triton_itself(any_mode: RunningServer) -> None:
    for inputs, message in (({"stream": True}, "text_input"), ({"text_input": PROMPT, "stream": 3}, "stream")):
        (answer,) = RawStream(any_mode.grpc_url, inputs).all()
        assert answer.error is not None
        assert message in answer.error


def test_a_prompt_longer_than_the_pool_or_a_limit_is_refused_by_its_number(start_server: Any) -> None:
    server = start_server("inflight", num_kv_blocks=8, max_prompt_len=60, max_output_len=50)
    for text, sampling, message in (
        (("word " * 61).strip(), GREEDY, "text_input has 61 tokens; this model takes at most 60"),
        ("word", {"max_tokens": 51}, "max_tokens must be from 1 to 50"),
        ("word " * 100, {"max_tokens": 40}, "this model takes at most 60"),
    ):
        (answer,) = RawStream(server.grpc_url, text_inputs(text, sampling)).all()
        assert answer.error is not None
        assert message in answer.error


def test_nothing_is_left_behind(any_mode: RunningServer) -> None:
    time.sleep(0.5)
    values = figures(any_mode)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_blocks_held"):
        assert values[gauge] == 0
