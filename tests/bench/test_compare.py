"""Comparison of modes, each of which is an echo model here, on the real tritonserver."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from noria_bench import compare as compare_module
from noria_bench import compare_command as cli
from noria_bench.compare import ServerUrls, compare
from noria_bench.workload import WorkItem, Workload
from noria_client.errors import ServerError


def workload_of(*prompts):
    return Workload(tuple(WorkItem(prompt, len(prompt.split()), 5) for prompt in prompts))


@pytest.fixture
def start_server(echo_server):
    """Notes which modes were started and stopped."""
    journal = []

    @contextmanager
    def start(mode):
        journal.append(f"start {mode}")
        try:
            yield ServerUrls(echo_server.grpc, echo_server.http, echo_server.metrics)
        finally:
            journal.append(f"stop {mode}")

    start.journal = journal
    return start


@pytest.fixture
def console():
    return Console(file=StringIO(), width=200)


def test_one_result_per_mode(start_server, console):
    workload = workload_of("a b c d e f g", "a", "!error on purpose")
    results = compare(["static", "inflight"], start_server, workload, model="stream_batched", console=console)
    assert start_server.journal == ["start static", "stop static", "start inflight", "stop inflight"]
    assert [result.mode for result in results] == ["static", "inflight"]
    for result in results:
        assert (result.num_succeeded, result.num_errors) == (2, 1)
        assert result.errors == {"UNKNOWN: on purpose": 1}
        assert result.useful_output_tokens_per_s == pytest.approx((5 + 1) / result.wall_s)
        # the echo model has no engine to count steps
        assert result.slot_utilisation is None
        assert not result.is_interrupted


def test_progress_is_printed_line_by_line_off_a_terminal(start_server, console, monkeypatch):
    monkeypatch.setattr("noria_bench.progress.LINE_INTERVAL_S", 0.02)
    compare(["inflight"], start_server, workload_of("!slow a b c"), model="stream", console=console)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "inflight: starting the server"
    assert lines[1].startswith("inflight: 1 open, 0 of 1 finished, ")


def test_progress_is_a_bar_on_a_terminal(start_server):
    console = Console(file=StringIO(), width=200, force_terminal=True)
    compare(["inflight"], start_server, workload_of("a"), model="stream", console=console)
    assert "1 of 1 finished" in console.file.getvalue()


def test_a_failed_warm_up_ends_the_comparison(start_server, console):
    with pytest.raises(ServerError, match="not now"):
        compare(["static"], start_server, workload_of("!error not now"), model="stream", console=console)
    assert start_server.journal == ["start static", "stop static"]


def test_an_interrupt_keeps_what_was_measured(start_server, console, monkeypatch):
    real_load = compare_module.run_load

    async def interrupted_load(client, workload, run, concurrency):
        await real_load(client, Workload(workload.items[:1]), run, concurrency)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module, "run_load", interrupted_load)
    results = compare(["static", "inflight"], start_server, workload_of("a", "b"), model="stream", console=console)
    assert [(result.mode, result.num_succeeded, result.is_interrupted) for result in results] == [("static", 1, True)]
    assert start_server.journal == ["start static", "stop static"]


def test_command_prints_the_table_and_writes_json(start_server, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    cli.add_compare_arguments(parser)
    path = tmp_path / "results.json"
    flags = ["--modes", "static,inflight", "--num-requests", "4", "--scale", "0.05"]
    assert cli.run_compare(parser.parse_args([*flags, "--json", str(path)]), start_server, "stream") == 0
    assert "useful output tokens/s" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert [result["mode"] for result in results] == ["static", "inflight"]
    assert all(result["num_succeeded"] == 4 for result in results)
    assert results[0]["e2e_s"].keys() == {"median", "p95", "p99"}
