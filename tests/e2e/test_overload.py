"""More requests than there is room for, on the real server: whose queue refuses what, who goes first, what comes back.

On a tiny model, with limits so small that a few requests reach them.
"""

import http.client
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions, default_repository
from noria.serving.sinks import MAX_BYTES_WITH_FINAL
from noria_client import errors
from noria_client.client import Client
from noria_client.errors import ServerError
from support.raw_triton import RawResponse, RawStream, text_inputs
from support.server_figures import figures
from support.tiny_models import tiny_model_dir

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 6000}
SHORT = GREEDY | {"max_tokens": 3}
# `execute` works on this for a second or more, as it is all one word, before it refuses it; requests that come
# meanwhile wait in Triton's queue
PLUG = text_inputs("word" * 500_000)
# of the rest, one of level 3 waits a tenth of a second at most, and two of any other level may wait
QUEUE_POLICY = """
dynamic_batching {
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { max_queue_size: 2 }
  priority_queue_policy {
    key: 3 value { timeout_action: REJECT default_timeout_microseconds: 100000 allow_timeout_override: true }
  }
}
"""
Serve = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """serve(pbtxt, **engine): a server in in-flight mode with `pbtxt` added to its config."""
    folder = tmp_path_factory.mktemp("overload")
    model = tiny_model_dir(folder / "model", "llama", max_position_embeddings=8192)
    with ExitStack() as stack:

        def start(pbtxt: str, **engine: object) -> RunningServer:
            repository = folder / f"repository-{len(list(folder.iterdir()))}"
            shutil.copytree(default_repository(), repository)
            with (repository / "llm" / "configs" / "inflight.pbtxt").open("a") as config:
                config.write(pbtxt)
            http_port, grpc_port, metrics_port = free_ports(HOST, (0, 0, 0))
            options = ServerOptions(
                repository,
                "inflight",
                HOST,
                http_port,
                grpc_port,
                metrics_port,
                {"model": str(model)} | engine,
            )
            return stack.enter_context(RunningServer(options, repository / "server.log"))

        yield start


@pytest.fixture(scope="module")
def one_slot(serve: Serve) -> RunningServer:
    """One sequence at a time, three more in the engine's queue, and Triton's queue with a policy of its own."""
    return serve(QUEUE_POLICY, max_num_seqs=1, max_queue_size=3, kv_cache_gib=0.05)


@pytest.fixture(scope="module")
def tiny_pool(serve: Serve) -> RunningServer:
    """Room for 1,600 tokens; prompts come in by 64 a step; those driven out go to the host as long as it has room."""
    return serve(
        "",
        max_num_seqs=4,
        num_kv_blocks=100,
        num_host_blocks=40,
        preemption="swap",
        max_num_batched_tokens=64,
        admission_headroom=0.0,
    )


def wait_for(server: RunningServer, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The server's figures once they are as they should be."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(values := figures(server)):
        assert time.monotonic() < deadline, values
        time.sleep(0.02)
    return values


def is_idle(values: dict[str, float]) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_requests_paused", "kv_blocks_held")
    return not any(values.get(name, 0) for name in names)


def stream(server: RunningServer, sampling: dict[str, Any], text: str = "hello", **options: Any) -> RawStream:
    return RawStream(server.grpc_url, text_inputs(text, sampling, stream=True), **options)


def text_of(responses: list[RawResponse]) -> str:
    assert [response.error for response in responses] == [None] * len(responses)
    return "".join(response.outputs["text_output"][0] for response in responses)


class Ends:
    """Who has ended, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._threads: list[threading.Thread] = []

    def follow(self, name: str, read: Callable[[], Any]) -> None:
        def run() -> None:
            read()
            self.names.append(name)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def all(self) -> list[str]:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return self.names


def test_tritons_queue_policy_holds_while_execute_is_busy_and_its_order_reaches_the_engine(
    one_slot: RunningServer,
) -> None:
    plug = RawStream(one_slot.grpc_url, PLUG)
    time.sleep(0.1)
    late = stream(one_slot, SHORT, priority=3)
    ordinary = [stream(one_slot, SHORT) for _ in range(3)]
    urgent = stream(one_slot, SHORT, priority=1)
    answers = [one.all() for one in ordinary]
    refused = [answer[0].error for answer in answers if answer[0].error is not None]
    assert len(refused) == 1
    assert "exceeds maximum queue size" in refused[0].lower()
    assert "timeout expired" in str(late.all()[-1].error).lower()
    assert text_of(urgent.all())
    assert "text_input has" in str(plug.all()[0].error)


def test_tritons_queue_does_not_see_what_waits_in_the_engine_whose_own_limit_is_another(
    one_slot: RunningServer,
) -> None:
    wait_for(one_slot, is_idle)
    before = figures(one_slot)
    running = stream(one_slot, LONG)
    running.next()
    # more than the two that Triton's queue would hold
    waiting = [stream(one_slot, LONG) for _ in range(3)]
    wait_for(one_slot, lambda values: values["num_requests_waiting"] == 3)
    with Client(one_slot.grpc_url, has_error_codes=True) as client:
        with pytest.raises(ServerError, match="the waiting queue is full: max_queue_size is 3 requests; ") as full:
            client.generate("hello", max_tokens=3)
        assert full.value.code == errors.UNAVAILABLE
        assert "again later" in str(full.value) or "retry after" in str(full.value)
        waiting[0].cancel()
        wait_for(one_slot, lambda values: values["num_requests_waiting"] == 2)
        with pytest.raises(ServerError, match="the request's timeout passed before it was done") as late:
            client.generate("hello", max_tokens=3, timeout_s=0.2)
        assert late.value.code == errors.UNAVAILABLE
    for one in (running, *waiting[1:]):
        one.cancel()
    after = wait_for(one_slot, is_idle)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (grown["requests_rejected_total"], grown["requests_expired_total"]) == (1, 1)
    assert grown["requests_cancelled_total"] == 4
    assert grown["requests_failed_total"] == 6


def test_priority_reaches_the_engine_through_the_client_and_through_http(one_slot: RunningServer) -> None:
    wait_for(one_slot, is_idle)
    # of the highest level itself, so that it stays
    running = stream(one_slot, LONG | {"priority": 1})
    running.next()
    ends = Ends()
    ordinary = stream(one_slot, SHORT)
    ends.follow("ordinary", ordinary.all)
    wait_for(one_slot, lambda values: values["num_requests_waiting"] == 1)
    with Client(one_slot.grpc_url) as client:
        ends.follow("urgent over gRPC", lambda: client.generate("hello", priority=1, **SHORT))
        wait_for(one_slot, lambda values: values["num_requests_waiting"] == 2)
        ends.follow("urgent over HTTP", lambda: post(one_slot, {"text_input": "hello", "priority": 1} | SHORT))
        wait_for(one_slot, lambda values: values["num_requests_waiting"] == 3)
        running.cancel()
        assert ends.all() == ["urgent over gRPC", "urgent over HTTP", "ordinary"]


def test_the_http_priority_is_checked_and_must_not_contradict_the_tensor(one_slot: RunningServer) -> None:
    for body, message in (
        ({"priority": 4}, "priority must be from 1 to 3, or 0 for the default (2), not 4"),
        ({"priority": 1, "sampling_parameters": '{"priority": 2}'}, "priority is 2 in sampling_parameters and 1 among"),
    ):
        status, reply = post(one_slot, {"text_input": "hello"} | body)
        assert status == 400
        assert message in reply["error"]


def post(server: RunningServer, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http_url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v2/models/llm/generate", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_an_answer_too_large_to_go_with_final_comes_whole_over_both_protocols(one_slot: RunningServer) -> None:
    sampling = GREEDY | {"max_tokens": 100, "logprobs": 20}
    wanted = {"return_logprobs": True, "exclude_input_in_output": True}
    status, reply = post(one_slot, {"text_input": "hello"} | sampling | wanted)
    assert status == 200
    assert len(reply["logprobs"]) > MAX_BYTES_WITH_FINAL
    data, final = RawStream(one_slot.grpc_url, text_inputs("hello", sampling, **wanted)).all()
    assert data.outputs["logprobs"] == [reply["logprobs"]]
    assert (data.is_final, final.is_final, final.outputs) == (False, True, {})


def test_whoever_leaves_in_whatever_state_gives_everything_back_and_a_neighbour_does_not_notice(
    tiny_pool: RunningServer,
) -> None:
    sampling = GREEDY | {"max_tokens": 450}
    alone = text_of(stream(tiny_pool, sampling).all())
    before = wait_for(tiny_pool, is_idle)
    stayer = stream(tiny_pool, sampling)
    leavers = [stream(tiny_pool, GREEDY | {"max_tokens": 1500}, text) for text in ("a", "b", "c", "d", "e")]
    # they have grown out of the pool: one at least was driven out, to the host, and one waits
    wait_for(
        tiny_pool,
        lambda values: values["swap_outs_total"] > before["swap_outs_total"] and values["num_requests_waiting"],
    )
    # its prompt of 300 tokens takes five steps
    leavers.append(stream(tiny_pool, SHORT | {"priority": 1}, "x" * 300))
    for leaver in leavers:
        leaver.cancel()
    wait_for(tiny_pool, lambda values: values["num_requests_running"] <= 1 and not values["num_requests_waiting"])
    assert text_of(stayer.all()) == alone
    after = wait_for(tiny_pool, is_idle)
    assert after["requests_cancelled_total"] - before["requests_cancelled_total"] >= 5
    # the pools are whole: as many as before fit again, and swap again
    streams = [stream(tiny_pool, GREEDY | {"max_tokens": 430}, text) for text in ("a", "b", "c", "d")]
    for one in streams:
        assert text_of(one.all())
    wait_for(tiny_pool, is_idle)
