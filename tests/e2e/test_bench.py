"""`noria bench` as a user runs it, on the real server: what the client saw and what the server counted agree."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from noria.cli import main
from noria.serving.server import RunningServer
from noria_bench.results import Result, read_records, read_result, read_series

WORKLOAD = """
num_requests: 12
classes:
  - name: chat
    share: 3
    prompt_tokens: uniform:40:56
    output_tokens: uniform:4:12
    priority: 1
    slo: ttft_p95=60
    shared_prefix: {tokens: 32}
  - name: leaves
    share: 1
    prompt_tokens: constant:8
    output_tokens: constant:60
    cancel: {after_tokens: "constant:3"}
"""
# a machine that tests and measures at once may well be too slow for its load generator, and says so
EXIT_CODES = (0, 1)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    return path


def bench(output: Path, server: RunningServer | None, *words: str) -> Result:
    attached = [] if server is None else attach(server)
    assert main(["bench", *words, *attached, "--output", str(output)]) in EXIT_CODES
    return read_result(output)


def attach(server: RunningServer) -> list[str]:
    urls = {"--url": server.grpc_url, "--http-url": server.http_url, "--metrics-url": server.metrics_address}
    return [word for pair in urls.items() for word in pair]


def test_classes_cancels_and_shared_prefixes_on_a_running_server(
    start_server: Callable[..., RunningServer], workload: Path, tmp_path: Path
) -> None:
    result = bench(tmp_path / "result", start_server("inflight"), str(workload), "--seed", "2")
    (run,) = result.runs
    assert run.summary.all.outcomes == {"finished": 8, "cancelled": 4}
    assert set(run.summary.classes) == {"chat", "leaves"}
    assert run.summary.classes["chat"].good_share == 1
    assert run.mismatches == ()
    server = run.summary.server
    assert server is not None
    assert server.num_steps > 0
    assert server.prefix_hit_rate is not None
    assert server.prefix_hit_rate > 0
    assert server.queue_s is not None
    assert run.environment["config"]["parameters"]["batching_mode"]["string_value"] == "inflight"
    records = read_records(tmp_path / "result", run.name)
    for record in records:
        assert len(record.chunks) > 0
        assert record.times_s == sorted(record.times_s)
    assert read_series(tmp_path / "result", run.name)


@pytest.mark.slow
def test_configs_are_loaded_in_turn_on_one_server_and_the_same_again_by_replay(tmp_path: Path) -> None:
    words = ["--num-requests", "4", "--scale", "0.05", "--reload", "--modes", "static,inflight"]
    narrow = ["--variant", "narrow:max_num_seqs=1", "--engine", "kv_cache_gib=0.25"]
    result = bench(tmp_path / "first", None, *words, *narrow)
    labels = [run.label for run in result.runs]
    assert labels == ["static", "inflight", "narrow"]
    for run in result.runs:
        assert run.summary.all.outcomes == {"finished": 4}
        assert run.mismatches == ()
        assert run.engine["max_num_seqs"] == (1 if run.label == "narrow" else 8)
        assert run.engine["kv_cache_gib"] == 0.25
    batches = {run.label: run.summary.server.mean_batch for run in result.runs if run.summary.server is not None}
    assert batches["narrow"] == 1
    assert batches["static"] == 4
    replayed = bench(tmp_path / "again", None, "--replay", str(tmp_path / "first"))
    assert replayed.workload == result.workload
    assert [run.name for run in replayed.runs] == [run.name for run in result.runs]
    assert replayed.environment["model"] == result.environment["model"]


@pytest.mark.slow
def test_a_sweep_finds_where_the_slo_breaks(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """Of a server that refuses what would have to wait, the rate is bounded by its one slot."""
    server = start_server("inflight", max_num_seqs=1, max_queue_size=1)
    words = ["constant:8", "--prompt-tokens", "constant:8", "--sweep", "0.5:100", "--slo", "ttft_p95=30"]
    result = bench(tmp_path / "result", server, *words, "--probe-seconds", "3", "--resolution", "3")
    (capacity,) = result.capacities
    assert capacity.is_bounded
    assert capacity.rate is None or capacity.rate < 100
    assert capacity.broken_by == "ttft_p95"
    assert any(run.summary.all.outcomes.get("rejected") for run in result.runs)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start_server("inflight")
    output = tmp_path / "result"
    words = ["constant:2000", "--prompt-tokens", "constant:8", "--num-requests", "2", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "noria.cli", "bench", *words, *attach(server)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert any("started" in line for line in process.stderr)
        # into the answers
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    (run,) = read_result(output).runs
    assert run.is_interrupted
    assert run.summary.all.outcomes == {"aborted": 2}
    assert run.mismatches == ()
    assert all(record.num_output_tokens > 0 for record in read_records(output, run.name))
