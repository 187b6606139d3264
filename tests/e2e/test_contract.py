"""The text contract on the real server with the real model: every output, streamed or not, over gRPC and HTTP."""

import json
import urllib.request
from typing import Any

import pytest

from noria.serving.server import RunningServer
from support.raw_triton import RawInfer, RawResponse, RawStream, text_inputs

PROMPT = "The capital of France is"
ALL_OUTPUTS = dict.fromkeys(
    (
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    ),
    True,
)


def stream(server: RunningServer, text: Any = PROMPT, **inputs: Any) -> list[RawResponse]:
    sampling = {"max_tokens": 12, "temperature": 0} | inputs.pop("sampling", {})
    return RawStream(server.grpc_url, text_inputs(text, sampling, stream=True, **inputs)).all()


def text_of(responses: list[RawResponse]) -> str:
    return "".join(response.outputs["text_output"][0] for response in responses)


def test_a_stream_adds_up_to_the_whole_answer_and_final_rides_on_the_last_chunk(any_mode: RunningServer) -> None:
    streamed = stream(any_mode, **ALL_OUTPUTS)
    (whole,) = RawStream(
        any_mode.grpc_url, text_inputs(PROMPT, {"max_tokens": 12, "temperature": 0}, **ALL_OUTPUTS)
    ).all()
    assert len(streamed) > 4
    assert PROMPT + text_of(streamed) == whole.outputs["text_output"][0]
    assert " Paris" in text_of(streamed)
    assert all(response.outputs["text_output"][0] for response in streamed[:-1])
    assert [response.is_final for response in streamed] == [False] * (len(streamed) - 1) + [True]
    assert [response.outputs["finish_reason"][0] for response in streamed[:-1]] == ["None"] * (len(streamed) - 1)
    assert streamed[-1].outputs["finish_reason"] == whole.outputs["finish_reason"] == ["length"]
    assert sum(response.outputs["num_output_tokens"][0] for response in streamed) == 12
    assert whole.outputs["num_output_tokens"] == [12]
    assert whole.outputs["num_input_tokens"] == streamed[0].outputs["num_input_tokens"] == [5]
    tokens = [entry for response in streamed for entry in json.loads(response.outputs["logprobs"][0])]
    assert len(tokens) == 12
    total = sum(next(iter(entry.values()))["logprob"] for entry in tokens)
    assert abs(total - whole.outputs["cumulative_logprob"][0]) < 1e-3
    assert abs(total - streamed[-1].outputs["cumulative_logprob"][0]) < 1e-3


def test_only_text_comes_unless_more_is_asked_for(any_mode: RunningServer) -> None:
    assert {name for response in stream(any_mode) for name in response.outputs} == {"text_output"}


def test_an_instruct_model_answers_a_question_through_its_chat_template(any_mode: RunningServer) -> None:
    sampling = {"apply_chat_template": True, "max_tokens": 20}
    messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    for text in ("What is the capital of France?", messages):
        responses = stream(any_mode, text, sampling=sampling, return_finish_reason=True)
        assert text_of(responses) == "The capital of France is Paris."
        assert responses[-1].outputs["finish_reason"] == ["stop"]


def test_a_character_of_several_tokens_comes_whole(any_mode: RunningServer) -> None:
    responses = stream(any_mode, "🦊🦊🦊🦊🦊🦊", sampling={"max_tokens": 15}, return_num_output_tokens=True)
    assert "🦊" in text_of(responses)
    # a fox is three tokens; the output may be cut within one, which only the last chunk may show
    assert len(responses) < 15
    assert not any("\ufffd" in response.outputs["text_output"][0] for response in responses[:-1])


def test_http_generate_and_generate_stream_say_what_grpc_says(any_mode: RunningServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0, "id": "x"}
    whole = _post(any_mode, "generate", body | {"exclude_input_in_output": True})
    assert whole["text_output"] == text_of(stream(any_mode))
    events = _post_stream(any_mode, body | {"stream": True, "return_finish_reason": True})
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert [event["finish_reason"] for event in events][-2:] == ["None", "length"]


def test_seeded_sampling_gives_the_same_tokens_alone_and_in_a_batch(any_mode: RunningServer) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 16}
    alone = text_of(stream(any_mode, sampling=sampling))
    streams = [
        RawStream(any_mode.grpc_url, text_inputs(PROMPT, sampling | {"seed": seed}, stream=True))
        for seed in (7, 8, 7, 9)
    ]
    texts = [text_of(one.all()) for one in streams]
    assert texts[0] == texts[2] == alone
    assert len(set(texts)) == 3


def test_n_answers_and_stop_strings(any_mode: RunningServer) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 8}
    inputs = text_inputs(PROMPT, sampling, exclude_input_in_output=True)
    (response,) = RawStream(any_mode.grpc_url, inputs).all()
    assert len(set(response.outputs["text_output"])) == 3
    stopped = stream(any_mode, sampling={"stop": ["aris"]}, return_finish_reason=True)
    assert text_of(stopped).endswith(" P")
    assert stopped[-1].outputs["finish_reason"] == ["stop"]


def test_several_prompts_in_one_request_are_one_closed_batch(start_server: Any) -> None:
    server = start_server("static")
    prompts = [PROMPT, "Two plus two is"]
    inputs = text_inputs(prompts, {"max_tokens": 6, "temperature": 0}, stream=[True, True])
    responses = RawStream(server.grpc_url, inputs).all()
    for row, prompt in enumerate(prompts):
        joined = "".join(response.outputs["text_output"][row] for response in responses)
        assert joined == text_of(stream(server, prompt, sampling={"max_tokens": 6}))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static_unary", pytest.param("dynamic_unary", marks=pytest.mark.slow)])
def test_a_variant_that_is_not_decoupled_answers_a_plain_infer(start_server: Any, mode: str) -> None:
    server = start_server(mode)
    response = RawInfer(server.grpc_url, text_inputs(PROMPT, {"max_tokens": 12, "temperature": 0})).result()
    assert response.outputs["text_output"][0].startswith(PROMPT + " Paris")
    body = {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}
    assert _post(server, "generate", body)["text_output"] == response.outputs["text_output"][0]


def _post(server: RunningServer, endpoint: str, body: dict[str, Any]) -> Any:
    return json.loads(_request(server, endpoint, body))


def _post_stream(server: RunningServer, body: dict[str, Any]) -> list[Any]:
    lines = _request(server, "generate_stream", body).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _request(server: RunningServer, endpoint: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/llm/{endpoint}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())
