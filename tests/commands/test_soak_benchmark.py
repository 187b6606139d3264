"""`benchmarks/soak.py`: what it reads of processes, what it sends and how that must end, growth, steps, options."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from mmap import mmap
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMAND = BENCHMARKS / "soak.py"
# where `python benchmarks/soak.py` lies
sys.path.insert(0, str(BENCHMARKS))

from soak.command import main  # noqa: E402
from soak.load import INVALID, MAX_PROBLEMS, OUTPUT_TOKENS, PROMPT_TOKENS, Job, Kind, draw, problem_of  # noqa: E402
from soak.processes import ProcessUse, process_use, shm_mib, stub_of  # noqa: E402
from soak.report import condensed, held_table, steps_table  # noqa: E402
from soak.running import MAX_KEPT_PROBLEMS, Counts, RunningLoad  # noqa: E402
from soak.samples import Sample, growth, left_over, slope  # noqa: E402
from soak.steps import decode_times, step_times  # noqa: E402

from noria.engine.trace import RowKind  # noqa: E402
from noria.errors import EngineFailure  # noqa: E402
from noria.serving.machine import free_ports  # noqa: E402
from noria_bench.records import Chunk, Outcome, RequestRecord  # noqa: E402
from noria_bench.workload import WorkItem  # noqa: E402
from support.recordings import make_step  # noqa: E402
from support.tiny_models import tiny_model_dir  # noqa: E402
from support.waiting import wait_until  # noqa: E402

JOB = Job("localhost:1", 2, 60.0, seed=0, cancel_share=0.2, invalid_share=0.1, reconnect_share=0.0)
DRAW, CHUNK, PADDING = RowKind.DRAW, RowKind.CHUNK, RowKind.PADDING


def sample_at(time_s: float, finished: int = 0, rss_mib: float = 100.0, num_used_blocks: int = 0) -> Sample:
    use = ProcessUse(rss_mib, None, 10, 4)
    return Sample(time_s, use, use, 1.0, 0, 0, num_used_blocks, 5, 95 - num_used_blocks, Counts(finished=finished))


def record_of(outcome: Outcome, num_tokens: int = 0, error: str | None = None) -> RequestRecord:
    return RequestRecord(0, 0.0, 1.0, 20, (Chunk(0.5, num_tokens),), error, outcome)


def test_a_process_tells_what_it_holds() -> None:
    before = process_use(os.getpid(), "this")
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait) for _ in range(3)]
    held = bytearray(os.urandom(64 * 2**20))
    with open(os.devnull), open(os.devnull):
        for thread in threads:
            thread.start()
        now = process_use(os.getpid(), "this")
        is_over.set()
    assert now.num_fds == before.num_fds + 2
    assert now.num_threads == before.num_threads + 3
    # what was free before may have been taken
    assert now.rss_mib > before.rss_mib + len(held) / 2**20 / 2
    assert now.pss_mib is None or 0 < now.pss_mib <= now.rss_mib + 1


def test_of_a_process_that_has_ended_nothing_is_told() -> None:
    """One that nobody has waited for is still in /proc, with no memory and no files: it looked like one that shrank."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    status = Path(f"/proc/{process.pid}/status")
    while "zombie" not in status.read_text():
        time.sleep(0.01)
    with pytest.raises(EngineFailure, match=rf"tritonserver has ended \(process {process.pid}\)"):
        process_use(process.pid, "tritonserver")
    process.wait()
    with pytest.raises(EngineFailure, match="tritonserver has ended"):
        process_use(process.pid, "tritonserver")


def test_a_mapped_file_in_shared_memory_counts_once() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as nameless, tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        before = shm_mib([os.getpid()])
        for one in (nameless, file):
            one.write(bytes(3 * 2**20))
            one.flush()
        with mmap(file.fileno(), 0), mmap(file.fileno(), 0), mmap(nameless.fileno(), 0):
            assert shm_mib([os.getpid(), os.getpid()]) == before + 3
        assert shm_mib([os.getpid()]) == before


def test_the_stub_is_found_among_a_servers_children(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="must have one process triton_python_backend_stub, not 0"):
        stub_of(os.getpid())
    stub = tmp_path / "triton_python_backend_stub"
    shutil.copy("/bin/sleep", stub)
    with subprocess.Popen(["/bin/sleep", "60"]) as other, subprocess.Popen([stub, "60"]) as process:
        try:
            # Popen returns as soon as the program is taken, just before the system shows its command line
            wait_until(lambda: all(Path(f"/proc/{one.pid}/cmdline").read_bytes() for one in (other, process)))
            assert stub_of(os.getpid()) == process.pid
        finally:
            other.kill()
            process.kill()


def test_a_slope_is_the_least_squares_line_with_its_error() -> None:
    grown = slope([(0, 10.0), (1000, 12.0), (2000, 14.0), (3000, 16.0)])
    assert grown is not None
    assert (grown.per_1000, grown.standard_error) == pytest.approx((2.0, 0.0))
    # by hand: mean 2, Sxx 2, Sxy 1, residuals -0.5, 1, -0.5, of which the squares are 1.5
    grown = slope([(0, 1.0), (1000, 3.0), (2000, 2.0)])
    assert grown is not None
    assert (grown.per_1000, grown.standard_error) == pytest.approx((0.5, (1.5 / 1 / 2) ** 0.5))


def test_growth_leaves_out_the_warm_up_and_is_not_told_where_little_was_finished() -> None:
    # it grows by 100 MiB at once, and by 1 MiB per 1,000 afterwards
    samples = [sample_at(float(t), 100 * t, 100.0 + 0.1 * t if t >= 2 else 0.0) for t in range(9)]
    grown = growth(samples, lambda sample: sample.server.rss_mib)
    assert grown is not None
    assert grown.per_1000 == pytest.approx(1.0)
    assert growth(samples, lambda sample: sample.server.pss_mib) is None
    assert growth([sample_at(float(t), 7) for t in range(9)], lambda sample: sample.server.rss_mib) is None
    assert (
        growth([sample_at(float(t), 10 * t, float(t)) for t in range(9)], lambda sample: sample.server.rss_mib) is None
    )
    assert growth(samples[:2], lambda sample: sample.server.rss_mib) is None
    assert growth([], lambda sample: sample.server.rss_mib) is None


def test_what_a_server_still_holds_at_rest_is_named() -> None:
    assert left_over(sample_at(9.0)) == []
    assert left_over(sample_at(9.0, num_used_blocks=3)) == [
        "3 KV blocks that are held at rest, after all requests had ended"
    ]


def test_steps_that_only_decode_are_grouped_by_their_rows() -> None:
    steps = [
        make_step(0, [(1, 0, 30, DRAW)]),
        make_step(1, [(1, 30, 1, DRAW)]),
        make_step(2, [(1, 31, 1, DRAW), (2, 0, 16, CHUNK)]),
        # the last known token but one of a prompt, alone in its chunk
        make_step(3, [(1, 32, 1, DRAW), (2, 16, 1, CHUNK)]),
        make_step(4, [(1, 33, 1, DRAW), (2, 17, 1, DRAW)]),
        make_step(5, [(1, 34, 1, DRAW), (2, 18, 1, PADDING)]),
        # only copied blocks
        make_step(6, []),
    ]
    assert decode_times(steps) == {1: [1000.0], 2: [1000.0, 1000.0]}


def test_the_tables_show_a_few_moments_and_the_commonest_steps() -> None:
    samples = [sample_at(float(t), 10 * t, 100.0 + t) for t in range(101)]
    assert [sample.time_s for sample in condensed(samples)] == [0, 10, 25, 50, 75, 100]
    assert condensed(samples[:1]) == samples[:1]
    lines = held_table(samples, sample_at(103.0, 1000, 200.0)).splitlines()
    assert lines[0] == "|  | 0 s | 10 s | 25 s | 50 s | 75 s | 100 s | at rest | growth per 1,000 finished |"
    assert "| stub RSS, MiB | 100.0 | 110.0 | 125.0 | 150.0 | 175.0 | 200.0 | 200.0 | +100.00 ± 0.00 |" in lines
    assert len({line.count("|") for line in lines}) == 1
    took = step_times([10.0] * 98 + [20.0, 40.0])
    assert (took.num_steps, took.median_ms, took.max_ms) == (100, 10.0, 40.0)
    assert took.p99_over_median == pytest.approx(2.02)
    # of nine numbers of sequences, the rarest is left out
    lines = steps_table({num: [1.0] * (1 if num == 4 else 5) for num in range(1, 10)}).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["1", "2", "3", "5", "6", "7", "8", "9"]


def test_what_is_sent_is_drawn_by_the_seed() -> None:
    rng = random.Random(5)
    items = [draw(rng, JOB) for _ in range(2000)]
    assert items[:50] == [draw(again, JOB) for again in [random.Random(5)] for _ in range(50)]
    kinds = Counter(Kind(item.request_class) for item in items)
    # four standard deviations of the binomial law are 0.036 and 0.027
    assert kinds[Kind.CANCELLED] / len(items) == pytest.approx(0.2, abs=0.036)
    assert kinds[Kind.INVALID] / len(items) == pytest.approx(0.1, abs=0.027)
    lengths = {item.num_prompt_tokens for item in items}
    assert (min(lengths), max(lengths)) == PROMPT_TOKENS
    ordinary = {item.max_tokens for item in items if item.request_class == Kind.ORDINARY.value}
    assert (min(ordinary), max(ordinary)) == OUTPUT_TOKENS
    for item in items:
        assert (item.cancel_after_tokens is not None) == (item.request_class == Kind.CANCELLED.value)
        assert item.cancel_after_tokens is None or 1 <= item.cancel_after_tokens < item.max_tokens
    invalid = [item.sampling for item in items if item.request_class == Kind.INVALID.value]
    assert all(one in invalid for one in INVALID)


@pytest.mark.parametrize(
    ("kind", "record", "problem"),
    [
        (Kind.ORDINARY, record_of(Outcome.FINISHED, 8), None),
        (Kind.ORDINARY, record_of(Outcome.FINISHED, 7), "an answer has 7 tokens, not 8"),
        (Kind.ORDINARY, record_of(Outcome.FAILED, 3, "INTERNAL: lost"), "a request failed: INTERNAL: lost"),
        (Kind.CANCELLED, record_of(Outcome.CANCELLED, 3), None),
        (Kind.CANCELLED, record_of(Outcome.FAILED, 0, "lost"), "a request that was to be cancelled failed: lost"),
        (Kind.INVALID, record_of(Outcome.FAILED, 0, "top_p must be from 0.0 to 1.0"), None),
        (
            Kind.INVALID,
            record_of(Outcome.FAILED, 0, "lost"),
            "with an invalid top_p was not refused by that name: lost",
        ),
        (Kind.INVALID, record_of(Outcome.FINISHED, 8), "was not refused by that name: finished"),
    ],
)
def test_a_request_must_end_as_it_was_meant_to(kind: Kind, record: RequestRecord, problem: str | None) -> None:
    sampling = {"top_p": 2.0} if kind is Kind.INVALID else {}
    found = problem_of(WorkItem("The river", 20, 8, request_class=kind.value, sampling=sampling), record)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_a_load_that_cannot_be_served_gives_up_and_says_why() -> None:
    url = f"127.0.0.1:{free_ports('127.0.0.1', (0, 0, 0))[0]}"
    with RunningLoad(Job(url, 2, 600.0, 0, 0.2, 0.1, 0.5)) as load:
        assert load.wait(60.0)
    assert load.counts.failed >= MAX_PROBLEMS
    assert load.counts.finished == load.counts.cancelled == load.counts.refused == 0
    assert len(load.problems) == MAX_KEPT_PROBLEMS + 1
    assert "UNAVAILABLE" in load.problems[0]
    assert load.problems[-1].startswith("the load gave up, after ")


def test_a_load_ends_with_its_block() -> None:
    """A server that takes connections and never answers: the load would wait for its whole length."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        with RunningLoad(Job(f"127.0.0.1:{server.getsockname()[1]}", 1, 600.0, 0, 0.0, 0.0, 0.0)) as load:
            connection, _ = server.accept()
            assert not load.wait(0.0)
    connection.close()
    # whoever stops it is told of no failure
    assert load.wait(0.0)
    assert load.problems == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--every", "0"], "--every must be seconds above 0, not 0.0"),
        (["--seconds", "10"], "--seconds must be at least 4 times --every (5.0), not 10.0"),
        (["--seconds", "inf"], "--seconds must be at least 4 times --every (5.0), not inf"),
        (["--cancel-share", "1.5"], "--cancel-share must be from 0 to 1, not 1.5"),
        (["--reconnect-share", "nan"], "--reconnect-share must be from 0 to 1, not nan"),
        (["--cancel-share", "0.5", "--invalid-share", "0.5"], "must be less than 1 together"),
        (["--json", "/nowhere/soak.json"], "--json /nowhere/soak.json cannot be written"),
        (["--mode", "fast"], "mode must be one of dynamic, dynamic_unary, inflight"),
        (["--engine", "no_such_key=1"], "no_such_key"),
    ],
)
def test_what_cannot_be_is_named(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("cancel_share", [0.0, 0.3])
def test_a_real_server_is_watched_under_load(cancel_share: float, tmp_path: Path) -> None:
    # its tokens are letters: a prompt is several times as long as asked
    model_dir = tiny_model_dir(tmp_path / "model", "llama", max_position_embeddings=8192)
    path = tmp_path / "soak.json"
    options = ["--model", str(model_dir), "--engine", "num_kv_blocks=4000", "--json", str(path)]
    options += ["--seconds", "8", "--every", "1", "--cancel-share", str(cancel_share), "--invalid-share", "0.2"]
    done = subprocess.run([sys.executable, str(COMMAND), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    counts = content["idle"]["counts"]
    assert counts.pop("failed") == 0
    if cancel_share == 0:
        assert counts.pop("cancelled") == 0
    assert all(counts.values()), counts
    assert len(content["samples"]) >= 5
    num_fds = [sample["server"]["num_fds"] for sample in content["samples"]]
    # each of the eight clients has a connection of its own
    assert max(num_fds) >= num_fds[0] + 8
    if cancel_share == 0:
        # None that was left stays open; the server opens a file for a moment now and then. A few of those whose last
        # stream was cancelled do stay (README, of tritonserver 2.51).
        assert content["idle"]["server"]["num_fds"] <= num_fds[0] + 2
    assert counts["reconnects"] > 2
    assert content["idle"]["stub"]["rss_mib"] > content["idle"]["server"]["rss_mib"] > 1
    assert sum(len(times) for times in content["steps_ms"].values()) == sum(
        one["num_steps"] for one in content["steps"].values()
    )
    assert "8" in content["steps"]
    assert "| stub RSS, MiB |" in done.stdout
