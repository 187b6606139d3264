"""A request takes the shape that the model's config asks for, in both protocols."""

from __future__ import annotations

import json

import grpc
import pytest

from noria_client import errors
from noria_client.grpc_transport import to_message
from noria_client.http_transport import to_body
from noria_client.text_request import ModelTraits, build_request

UNBATCHED = ModelTraits(max_batch_size=0, is_decoupled=True)
BATCHED = ModelTraits(max_batch_size=8, is_decoupled=True)


def request_of(prompt="hello", is_streamed=True, timeout_s=None, priority=0, **sampling):
    return build_request(prompt, is_streamed, timeout_s, priority, sampling)


@pytest.mark.parametrize(("traits", "shape"), [(UNBATCHED, [1]), (BATCHED, [1, 1])])
def test_tensors_follow_max_batch_size(traits, shape):
    message = to_message(request_of(), "llm", traits)
    assert message.model_name == "llm"
    assert {tuple(tensor.shape) for tensor in message.inputs} == {tuple(shape)}


def test_tensor_values_and_types():
    message = to_message(request_of("héllo", max_tokens=3), "llm", UNBATCHED)
    tensors = {tensor.name: tensor for tensor in message.inputs}
    assert tensors["text_input"].datatype == "BYTES"
    assert list(tensors["text_input"].contents.bytes_contents) == ["héllo".encode()]
    assert json.loads(tensors["sampling_parameters"].contents.bytes_contents[0]) == {"max_tokens": 3}
    assert tensors["stream"].datatype == "BOOL"
    assert list(tensors["stream"].contents.bool_contents) == [True]
    assert list(tensors["return_logprobs"].contents.bool_contents) == [False]


def test_inputs_are_the_same_set_whatever_is_asked():
    assert request_of().inputs().keys() == request_of(is_streamed=False, logprobs=2, n=2).inputs().keys()


def test_logprobs_are_returned_when_sampled():
    inputs = request_of(logprobs=0).inputs()
    assert inputs["return_logprobs"] is True
    assert inputs["return_cumulative_logprob"] is True


def test_empty_final_responses_are_asked_of_decoupled_models_only():
    final = "triton_enable_empty_final_response"
    assert to_message(request_of(), "llm", UNBATCHED).parameters[final].bool_param
    whole = ModelTraits(max_batch_size=0, is_decoupled=False)
    assert final not in to_message(request_of(), "llm", whole).parameters


def test_priority_goes_to_the_model_too_as_triton_keeps_its_own_to_itself():
    for priority, sent in ((0, {"max_tokens": 3}), (2, {"max_tokens": 3, "priority": 2})):
        inputs = request_of(priority=priority, max_tokens=3).inputs()
        assert json.loads(inputs["sampling_parameters"]) == sent


def test_timeout_and_priority():
    request = request_of(timeout_s=1.5, priority=2)
    message = to_message(request, "llm", UNBATCHED)
    assert message.parameters["timeout"].int64_param == 1_500_000
    assert message.parameters["priority"].uint64_param == 2
    body = json.loads(to_body(request))
    assert (body["timeout"], body["priority"]) == (1_500_000, 2)
    assert request.client_timeout_s > 1.5


def test_neither_timeout_nor_priority_unless_given():
    assert "timeout" not in to_message(request_of(), "llm", UNBATCHED).parameters
    assert not {"timeout", "priority"} & json.loads(to_body(request_of())).keys()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_bad_timeout_is_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        request_of(timeout_s=timeout_s)


def test_messages_ask_for_the_chat_template():
    messages = [{"role": "user", "content": "hi"}]
    request = request_of(messages, seed=None)
    assert json.loads(request.text) == messages
    assert request.sampling == {"apply_chat_template": True}


class FailedCall(grpc.RpcError):
    def __init__(self, status, details):
        self._status, self._details = status, details

    def code(self):
        return self._status

    def details(self):
        return self._details


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARG"),
        (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
        (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.DATA_LOSS, "UNKNOWN"),
    ],
)
def test_grpc_statuses_become_triton_codes(status, code):
    error = errors.from_grpc(FailedCall(status, "why"))
    assert (error.code, error.message, str(error)) == (code, "why", f"{code}: why")


@pytest.mark.parametrize(("status", "code"), [(404, "NOT_FOUND"), (503, "UNAVAILABLE"), (400, "UNKNOWN")])
def test_http_statuses_become_triton_codes(status, code):
    assert errors.from_http(status, "why").code == code
