"""The load generator as a process: it measures, it can be interrupted, and it says when it was the bottleneck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from noria_bench.errors import BenchError
from noria_bench.generator import Job, Progress
from noria_bench.generator_health import LoopMonitor
from noria_bench.generator_process import StopLoad, run_generator
from noria_bench.progress import progress_line
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.results import SeriesPoint
from noria_bench.workload import RequestClass, WorkItem, Workload
from support.processes import children


def job_of(echo_server, *items, model="stream", concurrency=None):
    return Job(echo_server.grpc, "grpc", model, Workload(tuple(items)), concurrency)


def test_a_job_survives_its_file():
    items = (WorkItem("a", 1, 2, 0.5, 1, "chat", {"priority": 1}), WorkItem("b", 1, 2))
    job = Job("host:1", "http", "llm", Workload(items, {"seed": 3}, (RequestClass("chat", "cpu"),)), 4, 2.5)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_records_in_the_workloads_order_and_progress_on_the_way(echo_server):
    told: list[Progress] = []
    items = [WorkItem("!slow a b c d e f g h", 9, 20), WorkItem("a", 1, 20), WorkItem("!error no", 1, 20)]
    generated = run_generator(job_of(echo_server, *items), told.append)
    assert [record.index for record in generated.records] == [0, 1, 2]
    assert [record.outcome for record in generated.records] == [Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED]
    assert not generated.is_interrupted
    assert generated.health.loop_lag_p99_s >= 0
    last = told[-1]
    assert (last.num_requests, last.num_ended, last.num_errors, last.num_open) == (3, 3, 1, 0)
    assert last.num_tokens == 9


@pytest.mark.parametrize(("chosen", "value"), [(None, "-event_engine_client"), ("tcp_frame_size_tuning",) * 2])
def test_grpcs_own_threads_carry_no_messages_but_where_the_user_says_so(echo_server, monkeypatch, chosen, value):
    def look(progress: Progress) -> None:
        for child in children(os.getpid()):
            if "noria_bench.generator" in Path(f"/proc/{child}/cmdline").read_text():
                lines.update(Path(f"/proc/{child}/environ").read_text().split("\0"))

    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GRPC_EXPERIMENTS", chosen)
    lines: set[str] = set()
    run_generator(job_of(echo_server, WorkItem("!slow a b c d e f g h", 9, 20)), look)
    assert f"GRPC_EXPERIMENTS={value}" in lines


def test_an_interrupt_keeps_what_was_measured_and_cancels_the_rest(echo_server):
    """Ctrl-C reaches the starter alone, which passes it on."""

    def interrupt(progress: Progress) -> None:
        if progress.num_ended == 1 and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)

    sent: list[bool] = []
    items = [WorkItem("a", 1, 5), WorkItem("!endless", 1, 100000), WorkItem("never sent", 1, 5)]
    generated = run_generator(job_of(echo_server, *items, concurrency=1), interrupt)
    assert generated.is_interrupted
    assert [record.outcome for record in generated.records] == [Outcome.FINISHED, Outcome.ABORTED]
    assert generated.records[1].num_output_tokens > 0


def test_without_a_server_the_reason_is_told():
    job = Job("127.0.0.1:1", "grpc", "llm", Workload((WorkItem("a", 1, 1),)), None)
    with pytest.raises(BenchError, match=r"the load generator failed: .*UNAVAILABLE"):
        run_generator(job, lambda _: None)


def test_a_generator_whose_starter_has_gone_ends(echo_server, tmp_path):
    """It went on for the whole load once nobody listened."""
    job = job_of(echo_server, WorkItem("!endless", 1, 10**6))
    (tmp_path / "job").write_text(json.dumps(job.to_json()))
    process = subprocess.Popen(
        [sys.executable, "-m", "noria_bench.generator", str(tmp_path / "job"), str(tmp_path / "records")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "progress" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=20) != 0
    finally:
        process.kill()
        process.wait()
    (line,) = (tmp_path / "records").read_text().splitlines()
    assert RequestRecord.from_json(json.loads(line)).outcome is Outcome.ABORTED


def record(lateness_s: float) -> RequestRecord:
    return RequestRecord(0, 10 + lateness_s, 11, 3, (Chunk(11, 1),), due_s=10)


@pytest.mark.parametrize(("lateness_s", "is_valid"), [(0.001, True), (0.2, False)])
def test_late_sends_make_a_run_invalid(lateness_s, is_valid):
    health = LoopMonitor().health([record(lateness_s)])
    assert (health.problems == ()) == is_valid
    assert health.lateness_max_s == pytest.approx(lateness_s)
    if not is_valid:
        assert "were sent more than 0.200 s late" in health.problems[0]


def test_a_loop_that_is_held_up_makes_a_run_invalid():
    import asyncio

    async def hold_up() -> LoopMonitor:
        monitor = LoopMonitor()
        watch = asyncio.create_task(monitor.watch())
        for _ in range(3):
            await asyncio.sleep(0.03)
            time.sleep(0.15)
        watch.cancel()
        return monitor

    health = asyncio.run(hold_up()).health([])
    assert health.loop_lag_p99_s > 0.1
    assert "time stamps may be more than" in health.problems[0]


def test_a_long_stall_counts_for_all_that_falls_into_it():
    """It was one late sample among many good ones, and the run was valid."""
    monitor = LoopMonitor()
    for _ in range(1000):
        monitor._note(0.0005)
    assert monitor.health([]).problems == ()
    monitor._note(2.0)
    assert "time stamps may be more than" in monitor.health([]).problems[0]


def test_a_generator_that_is_killed_makes_a_run_invalid(echo_server):
    """All that was under way had become records, and it passed for complete."""
    killed: list[int] = []

    def kill(_: Progress) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
        for pid in map(int, children):
            if pid not in killed and b"noria_bench.generator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                killed.append(pid)
                os.kill(pid, signal.SIGTERM)

    generated = run_generator(job_of(echo_server, WorkItem("!endless", 1, 10**6)), kill)
    assert killed
    assert not generated.is_interrupted
    assert [record.outcome for record in generated.records] == [Outcome.ABORTED]
    assert "the load generator ended early, with code 130" in generated.health.problems[-1]


def test_a_load_that_is_of_no_use_any_more_is_stopped(echo_server):
    """A run whose engine had died went on for ever."""

    def stop(_: Progress) -> None:
        raise StopLoad("the engine has not turned for 121 s: it hangs, or is dead")

    generated = run_generator(job_of(echo_server, WorkItem("!endless", 1, 10**6)), stop)
    assert not generated.is_interrupted
    assert [record.outcome for record in generated.records] == [Outcome.ABORTED]
    assert generated.health.problems[-1] == "the engine has not turned for 121 s: it hangs, or is dead"


def test_progress_line():
    progress = Progress(num_requests=4, num_sent=3, num_ended=1, num_errors=1, num_tokens=50, ttft_p95_s=1.25)
    point = SeriesPoint(0.0, num_running=1, num_waiting=0, kv_usage=0.4, generation_tokens=50)
    assert progress_line(progress, None, 25.0) == "1 of 4 done, 1 failed, 2 open, 25.0 tokens/s, TTFT p95 1.25 s"
    assert "1 running, 0 waiting" in progress_line(progress, point, 25.0)
    assert progress_line(progress, point, 25.0).endswith("KV 40%")


def test_the_generator_is_a_process_of_its_own(echo_server):
    seen: set[int] = set()

    def look(_: Progress) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
        seen.update(int(pid) for pid in children.read_text().split())

    run_generator(job_of(echo_server, WorkItem("!slow a b c d e f g h", 9, 20)), look)
    assert seen
