"""Greedy tokens are those of Transformers' `generate()`, in every mode, alone or in a batch, streamed or not."""

import json
import urllib.request
from typing import Any

import pytest

from noria.serving.server import RunningServer
from support.greedy_reference import (
    MAX_TOKENS,
    GreedyReference,
    compute_reference,
    first_difference,
    load_reference,
)
from support.raw_triton import RawStream, text_inputs

SAMPLING = {"temperature": 0, "max_tokens": MAX_TOKENS}


def token_ids(logprobs: list[str]) -> list[int]:
    """The chosen tokens, which come first in each token's entry."""
    return [int(next(iter(entry))) for text in logprobs for entry in json.loads(text)]


def ask(server: RunningServer, references: list[GreedyReference], is_streamed: bool) -> list[list[int]]:
    """All at once over gRPC."""
    inputs = [
        text_inputs(reference.prompt, SAMPLING, stream=is_streamed, return_logprobs=True) for reference in references
    ]
    streams = [RawStream(server.grpc_url, values) for values in inputs]
    return [
        token_ids([response.outputs["logprobs"][0] for response in stream.all() if response.outputs])
        for stream in streams
    ]


def ask_http(server: RunningServer, reference: GreedyReference) -> list[int]:
    body: dict[str, Any] = {"text_input": reference.prompt, "return_logprobs": True} | SAMPLING
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/llm/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        return token_ids([json.loads(response.read())["logprobs"]])


def check(references: list[GreedyReference], answers: list[list[int]]) -> None:
    for reference, answer in zip(references, answers, strict=True):
        index = first_difference(reference, answer)
        assert index is None, f"{reference.prompt!r} differs from token {index}: {answer}"


@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streamed", "whole"])
def test_several_at_once_in_every_mode(any_mode: RunningServer, is_streamed: bool) -> None:
    references = load_reference()[::3] if is_streamed else load_reference()[1::3]
    check(references, ask(any_mode, references, is_streamed))


def test_alone_over_http_in_every_mode(any_mode: RunningServer) -> None:
    reference = load_reference()[2]
    check([reference], [ask_http(any_mode, reference)])


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_all_prompts_in_every_mode(any_mode: RunningServer, is_streamed: bool) -> None:
    references = load_reference()
    check(references, ask(any_mode, references, is_streamed))


@pytest.mark.slow
def test_all_prompts_alone_over_grpc_and_http(any_mode: RunningServer) -> None:
    for reference in load_reference():
        check([reference] * 2, [ask(any_mode, [reference], True)[0], ask_http(any_mode, reference)])


@pytest.mark.slow
def test_the_reference_is_what_transformers_says_today() -> None:
    for kept, computed in zip(load_reference(), compute_reference(), strict=True):
        index = first_difference(kept, computed.token_ids)
        assert index is None, f"{kept.prompt!r} differs from token {index}"
