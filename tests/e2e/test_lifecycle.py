"""Clients that leave, deadlines, unloads: on the real server every block comes back, in every mode and state."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions, default_repository
from support.processes import children
from support.raw_triton import RawInfer, RawStream, text_inputs
from support.server_figures import figures
from support.tiny_models import tiny_model_dir
from support.waiting import wait_until

PROMPT = "The capital of France is"
LONG = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SHORT = {"max_tokens": 5, "temperature": 0}


def wait_until_idle(server: RunningServer, timeout_s: float = 10.0) -> None:
    """Long before 2,000 tokens could have been generated."""
    deadline = time.monotonic() + timeout_s
    names = ("num_requests_running", "num_requests_waiting", "kv_blocks_held")
    while values := {name: value for name, value in figures(server).items() if name in names and value}:
        assert time.monotonic() < deadline, f"still held: {values}"
        time.sleep(0.05)


def answer(server: RunningServer) -> str:
    (response,) = RawStream(server.grpc_url, text_inputs(PROMPT, SHORT)).all()
    return str(response.outputs["text_output"][0])


def test_a_grpc_cancel_while_decoding_frees_everything(any_mode: RunningServer) -> None:
    stream = RawStream(any_mode.grpc_url, text_inputs(PROMPT, LONG, stream=True))
    stream.next()
    stream.cancel()
    wait_until_idle(any_mode)
    assert "Paris" in answer(any_mode)


def test_a_grpc_cancel_of_an_answer_that_is_not_streamed_frees_everything(any_mode: RunningServer) -> None:
    stream = RawStream(any_mode.grpc_url, text_inputs(PROMPT, LONG))
    assert not stream.has_more(1.5)
    stream.cancel()
    wait_until_idle(any_mode)


def test_requests_that_wait_for_a_slot_can_leave_and_those_behind_them_are_served(start_server: Any) -> None:
    server = start_server("inflight")
    running = [RawStream(server.grpc_url, text_inputs(PROMPT, LONG, stream=True)) for _ in range(8)]
    for stream in running:
        stream.next()
    waiting = [RawStream(server.grpc_url, text_inputs(PROMPT, LONG, stream=True)) for _ in range(3)]
    time.sleep(0.5)
    assert figures(server)["num_requests_waiting"] == 3
    for stream in [*waiting, *running[:2]]:
        stream.cancel()
    assert "Paris" in answer(server)
    for stream in running[2:]:
        stream.cancel()
    wait_until_idle(server)


def test_an_http_client_that_disconnects_frees_everything(any_mode: RunningServer) -> None:
    """From `generate_stream`; of a client that leaves `generate` tritonserver 2.51 tells nobody."""
    host, port = any_mode.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = {"text_input": PROMPT, "stream": True} | LONG
    connection.request("POST", "/v2/models/llm/generate_stream", json.dumps(body))
    time.sleep(2.0)
    assert figures(any_mode)["kv_blocks_held"] > 0
    connection.close()
    wait_until_idle(any_mode)


def test_a_deadline_ends_a_request_with_an_error_of_its_own(any_mode: RunningServer) -> None:
    stream = RawStream(any_mode.grpc_url, text_inputs(PROMPT, LONG, stream=True), timeout_us=1_500_000)
    last = stream.all()[-1]
    assert str(last.error).startswith("the request's timeout passed before it was done")
    wait_until_idle(any_mode)


def test_an_unload_ends_a_live_stream_with_an_error_and_a_load_after_it_serves_again(any_mode: RunningServer) -> None:
    client = grpcclient.InferenceServerClient(any_mode.grpc_url)
    stream = RawStream(any_mode.grpc_url, text_inputs(PROMPT, LONG, stream=True))
    stream.next()
    client.unload_model("llm")
    assert stream.all()[-1].error == "the model is being unloaded"
    deadline = time.monotonic() + 20
    while client.get_model_repository_index().models[0].state != "UNAVAILABLE":
        assert time.monotonic() < deadline, "the model is not unloaded"
        time.sleep(0.1)
    client.load_model("llm")
    assert "Paris" in answer(any_mode)


def test_one_member_of_a_closed_batch_leaves_and_the_others_go_on(start_server: Any) -> None:
    server = start_server("static")
    # sent within the half second in which static collects its batch
    leaver = RawStream(server.grpc_url, text_inputs(PROMPT, LONG, stream=True))
    stayer = RawStream(server.grpc_url, text_inputs(PROMPT, LONG | {"max_tokens": 60}, stream=True))
    leaver.next()
    leaver.cancel()
    responses = stayer.all()
    assert all(response.error is None for response in responses)
    wait_until_idle(server)


@pytest.mark.parametrize("mode", ["static_unary", pytest.param("dynamic_unary", marks=pytest.mark.slow)])
def test_a_plain_infer_can_be_cancelled_time_out_and_be_unloaded(start_server: Any, mode: str) -> None:
    server = start_server(mode)
    client = grpcclient.InferenceServerClient(server.grpc_url)
    cancelled = RawInfer(server.grpc_url, text_inputs(PROMPT, LONG))
    time.sleep(1.5)
    assert figures(server)["kv_blocks_held"] > 0
    cancelled.cancel()
    wait_until_idle(server)
    late = RawInfer(server.grpc_url, text_inputs(PROMPT, LONG), timeout_us=1_000_000)
    assert str(late.result().error).startswith("the request's timeout passed before it was done")
    wait_until_idle(server)
    unloaded = RawInfer(server.grpc_url, text_inputs(PROMPT, LONG))
    time.sleep(1.5)
    client.unload_model("llm")
    assert unloaded.result().error == "the model is being unloaded"
    client.load_model("llm")
    assert "Paris" in RawInfer(server.grpc_url, text_inputs(PROMPT, SHORT)).result().outputs["text_output"][0]


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_a_server_that_is_told_to_stop_ends_its_streams_and_itself(mode: str, tmp_path: Path) -> None:
    ports = free_ports("127.0.0.1", (0, 0, 0))
    options = ServerOptions(default_repository(), mode, "127.0.0.1", *ports, engine={"kv_cache_gib": 0.3})
    with RunningServer(options, tmp_path / "server.log") as server:
        streams = [RawStream(server.grpc_url, text_inputs(PROMPT, LONG, stream=True)) for _ in range(2)]
        for stream in streams:
            stream.next()
        os.kill(server.pid, signal.SIGTERM)
        for stream in streams:
            assert stream.all()[-1].error == "the model is being unloaded"
        assert server.wait() == 0


@pytest.mark.slow
def test_a_killed_launcher_takes_its_server_with_it(tmp_path: Path) -> None:
    launcher, http_port = launch("max_num_seqs=4", tmp_path / "log")
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while not is_port_free(f"127.0.0.1:{http_port}"):
        assert time.monotonic() < deadline, "tritonserver outlived its launcher"
        time.sleep(0.2)


def test_a_launcher_that_is_told_to_stop_stops_its_server_and_says_all_is_well(tmp_path: Path) -> None:
    launcher, http_port = launch(f"model={tiny_model_dir(tmp_path / 'model', 'llama')}", tmp_path / "log")
    launcher.terminate()
    assert launcher.wait(60) == 0
    assert is_port_free(f"127.0.0.1:{http_port}")


def launch(setting: str, log_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A ready `noria serve`, and its HTTP port."""
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", (0, 0, 0))
    command = [sys.executable, "-m", "noria.cli", "serve", "--engine", setting, "--engine", "kv_cache_gib=0.3"]
    for kind, port in (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port)):
        command += [f"--{kind}-port", str(port)]
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(command, stderr=log)
    deadline = time.monotonic() + 60
    while "ready, mode inflight" not in log_path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return launcher, http_port


def test_a_crashed_server_leaves_no_stub_behind(tmp_path: Path) -> None:
    """Found after a crash of tritonserver: its stub waited for an answer for ever, and could not look after itself."""
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", (0, 0, 0))
    engine = {"model": str(tiny_model_dir(tmp_path / "model", "llama")), "kv_cache_gib": 0.05}
    options = ServerOptions(
        default_repository(), http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, engine=engine
    )
    with RunningServer(options, tmp_path / "log") as server:
        (stub,) = children(server.pid)
        os.kill(stub, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        assert Path(f"/proc/{stub}").exists()
    wait_until(lambda: not Path(f"/proc/{stub}").exists())


def is_port_free(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
