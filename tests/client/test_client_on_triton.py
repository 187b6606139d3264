"""The clients against a real tritonserver, in each shape of model and over each protocol."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing

import pytest

from noria_client.client import AsyncClient, Client
from noria_client.errors import ServerError
from support.echo_server import VARIANTS

DECOUPLED = [name for name, (_, is_decoupled) in VARIANTS.items() if is_decoupled]
protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])
models = pytest.mark.parametrize("model", list(VARIANTS))
decoupled_models = pytest.mark.parametrize("model", DECOUPLED)


@pytest.fixture
def client(echo_server, protocol, model):
    with Client(echo_server.url(protocol), protocol, model) as client:
        yield client


def run_async(echo_server, protocol, model, use):
    async def main():
        async with AsyncClient(echo_server.url(protocol), protocol, model) as client:
            return await use(client)

    return asyncio.run(main())


async def collect_stream(client, prompt, **options):
    return [delta async for delta in client.stream(prompt, **options)]


def wait_for_cancellation(client, prompt):
    """The echo model names the prompts of cancelled requests; it looks every 50 ms."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if prompt in client.generate("!cancelled").text.splitlines():
            return
        time.sleep(0.05)
    raise AssertionError(f"the server never saw {prompt!r} cancelled")


@protocols
@models
def test_stream(client, model):
    deltas = list(client.stream("un deux tröis"))
    assert "".join(delta.text for delta in deltas) == "un deux tröis "
    assert sum(delta.num_output_tokens for delta in deltas) == 3
    assert {delta.num_input_tokens for delta in deltas} == {3}
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert len(deltas) == (4 if model in DECOUPLED else 1)


@protocols
@models
def test_generate(client):
    generation = client.generate("a b c d", max_tokens=2, n=2, logprobs=0)
    assert generation.texts == ("a b ", "a b ")
    assert [answer.finish_reason for answer in generation.answers] == ["length", "length"]
    assert generation.answers[1].num_output_tokens == 2
    assert generation.logprobs == [{"word": "a "}, {"word": "b "}]
    assert generation.cumulative_logprob == -1.5


@protocols
@models
def test_async_stream_and_generate(echo_server, protocol, model):
    async def use(client):
        return await collect_stream(client, "a b"), await client.generate("c d")

    deltas, generation = run_async(echo_server, protocol, model, use)
    assert "".join(delta.text for delta in deltas) == "a b "
    assert deltas[-1].finish_reason == "stop"
    assert generation.text == "c d "


@protocols
@models
def test_what_the_server_receives(client, model):
    received = json.loads(client.generate("!request", timeout_s=5, stop=["x"], top_k=None).text)
    assert received["timeout_us"] == 5_000_000
    assert json.loads(received["inputs"]["sampling_parameters"]) == {"stop": ["x"]}
    assert received["inputs"]["exclude_input_in_output"] is True
    shape = [1, 1] if VARIANTS[model][0] else [1]
    assert all(tensor_shape == shape for tensor_shape in received["shapes"].values())


def test_many_streams_share_one_channel(echo_server):
    async def use(client):
        return await asyncio.gather(*(collect_stream(client, f"!slow {i} a b") for i in range(16)))

    for i, deltas in enumerate(run_async(echo_server, "grpc", "stream", use)):
        assert "".join(delta.text for delta in deltas) == f"{i} a b "


@protocols
@models
def test_error(client):
    with pytest.raises(ServerError, match="text_input is bad"):
        client.generate("!error text_input is bad")
    with pytest.raises(ServerError, match="text_input is bad"):
        list(client.stream("!error text_input is bad"))
    assert client.generate("still here").text == "still here "


@protocols
@decoupled_models
def test_error_after_the_first_words(client):
    stream = client.stream("!late first")
    assert next(stream).text == "first "
    with pytest.raises(ServerError, match="late failure"):
        next(stream)


@protocols
def test_async_errors(echo_server, protocol):
    async def use(client):
        failures = []
        for call in (
            client.generate("!error x"),
            collect_stream(client, "!error x"),
            collect_stream(client, "!late x"),
        ):
            with pytest.raises(ServerError) as caught:
                await call
            failures.append(caught.value.message)
        return failures

    assert run_async(echo_server, protocol, "stream", use) == ["x", "x", "late failure"]


def test_error_codes_on_grpc_streams_where_asked_for(echo_server):
    with Client(echo_server.grpc, model="stream", has_error_codes=True) as client:
        for prompt, code in (("!error x", "INVALID_ARG"), ("!late x", "INTERNAL")):
            with pytest.raises(ServerError) as caught:
                list(client.stream(prompt))
            assert caught.value.code == code


@protocols
def test_unknown_model(echo_server, protocol):
    with Client(echo_server.url(protocol), protocol, "absent") as client, pytest.raises(ServerError) as caught:
        client.generate("x")
    assert caught.value.code == "NOT_FOUND"
    assert "absent" in caught.value.message


@protocols
def test_no_server(protocol):
    # port 1 of the loopback is nobody's
    with Client("127.0.0.1:1", protocol) as client, pytest.raises(ServerError) as caught:
        client.generate("x")
    assert caught.value.code == "UNAVAILABLE"


@protocols
@models
def test_the_server_keeps_the_timeout(client):
    with pytest.raises(ServerError, match="deadline passed"):
        client.generate("!endless", timeout_s=0.15, max_tokens=100)
    with pytest.raises(ServerError, match="deadline passed"):
        list(client.stream("!endless", timeout_s=0.15, max_tokens=100))


@protocols
def test_the_client_gives_up_on_a_server_that_does_not(echo_server, protocol, monkeypatch):
    monkeypatch.setattr("noria_client.text_request.DEADLINE_GRACE_S", -0.3)
    prompt = f"!endless given up over {protocol}"
    with Client(echo_server.url(protocol), protocol, "stream") as client:
        with pytest.raises(ServerError) as caught:
            list(client.stream(prompt, timeout_s=0.5, max_tokens=100))
        assert caught.value.code == "DEADLINE_EXCEEDED"
        wait_for_cancellation(client, prompt)


@protocols
@decoupled_models
def test_closing_a_stream_cancels_on_the_server(client, protocol):
    prompt = f"!endless closed over {protocol}"
    stream = client.stream(prompt, max_tokens=1000)
    assert next(stream).text == "word "
    stream.close()
    wait_for_cancellation(client, prompt)


@protocols
@decoupled_models
def test_leaving_an_async_stream_cancels_on_the_server(echo_server, protocol, model):
    left, cancelled = (f"!endless async {how} over {protocol}" for how in ("left", "cancelled"))

    async def use(client):
        async with aclosing(client.stream(left, max_tokens=1000)) as stream:
            await anext(stream)
        task = asyncio.create_task(collect_stream(client, cancelled, max_tokens=1000))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(echo_server, protocol, model, use)
    with Client(echo_server.url(protocol), protocol, model) as client:
        wait_for_cancellation(client, left)
        wait_for_cancellation(client, cancelled)


def test_unknown_protocol():
    with pytest.raises(ValueError, match="protocol must be one of grpc, http, not 'ftp'"):
        Client("localhost:1", "ftp")
