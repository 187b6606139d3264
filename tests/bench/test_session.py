"""Interleaved runs: the order is fair, every run is kept at once, and an interrupt loses none."""

from __future__ import annotations

from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from noria_bench.environment import busy_cores, differences, machine
from noria_bench.errors import BenchError
from noria_bench.measurement import RunPlan, ServerUrls
from noria_bench.records import Outcome
from noria_bench.results import Result, read_records, read_result, read_series
from noria_bench.session import ResultFolder, Variant, run_session, turns
from noria_bench.slo import Objectives
from noria_bench.workload import WorkItem, Workload


@pytest.fixture
def journal():
    return []


@pytest.fixture
def variants(echo_server, journal):
    def variant(label):
        @contextmanager
        def start():
            journal.append(f"start {label}")
            try:
                yield ServerUrls(echo_server.grpc, echo_server.http, echo_server.metrics)
            finally:
                journal.append(f"stop {label}")

        return Variant(label, start, {"mode": label})

    return [variant("a"), variant("b")]


@pytest.fixture
def console():
    return Console(file=StringIO(), width=200)


def folder_of(path, **options):
    result = Result(["noria"], "now", {}, {"sha256": ""}, {}, {})
    return ResultFolder(path, result, **options)


def plan_of(*prompts, model="stream_batched", max_tokens=5):
    items = tuple(WorkItem(prompt, len(prompt.split()), max_tokens) for prompt in prompts)

    def plan(variant, repeat):
        return RunPlan(
            f"{variant.label}-{repeat}",
            variant.label,
            Workload(items),
            repeat=repeat,
            objectives={"default": Objectives(ttft_s=60.0)},
            model=model,
            engine=variant.engine,
        )

    return plan


def test_turns_go_forwards_and_backwards(variants):
    order = [(repeat, variant.label) for repeat, variant in turns(variants, 3)]
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_every_run_is_on_the_disk_with_its_records(variants, journal, console, tmp_path):
    assert run_session(variants, 1, plan_of("a b c", "!error on purpose"), folder_of(tmp_path), console)
    assert journal == ["start a", "stop a", "start b", "stop b"]
    result = read_result(tmp_path)
    assert [run.name for run in result.runs] == ["a-0", "b-0"]
    for run in result.runs:
        assert run.engine == {"mode": run.label}
        assert run.environment["server"]["name"]
        assert run.environment["config"]["name"] == "stream_batched"
        assert run.summary.all.outcomes == {"finished": 1, "failed": 1}
        assert run.summary.all.good_share == 0.5
        # the echo model has no engine that counts
        assert run.summary.server is None
        assert [record.outcome for record in read_records(tmp_path, run.name)] == [Outcome.FINISHED, Outcome.FAILED]
        assert read_series(tmp_path, run.name)
    output = console.file.getvalue()
    assert "a-0: 1 of 2 answered" in output
    assert "on purpose" in output


def test_records_need_not_be_kept(variants, console, tmp_path):
    run_session(variants[:1], 1, plan_of("a"), folder_of(tmp_path, keeps_records=False), console)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_an_interrupt_ends_the_session_and_keeps_its_runs(variants, journal, console, tmp_path, monkeypatch):
    """Ctrl-C while the second server starts."""

    @contextmanager
    def interrupted():
        raise KeyboardInterrupt
        yield

    stopped = Variant("b", interrupted)
    assert not run_session([variants[0], stopped], 1, plan_of("a"), folder_of(tmp_path), console)
    assert [run.name for run in read_result(tmp_path).runs] == ["a-0"]


def test_a_folder_that_vanishes_is_said_after_what_was_measured(variants, console, tmp_path):
    """The figures went with a traceback."""
    folder = folder_of(tmp_path / "result")
    (tmp_path / "result" / "result.json").unlink()
    (tmp_path / "result").rmdir()
    with pytest.raises(BenchError, match=r"--output .*result: No such file or directory"):
        run_session(variants[:1], 1, plan_of("a"), folder, console)
    assert "a-0: 1 of 1 answered" in console.file.getvalue()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match=r"--output .*file/result: Not a directory"):
        folder_of(tmp_path / "file" / "result")


def test_off_a_terminal_a_run_says_two_lines(variants, console, tmp_path):
    run_session(variants[:1], 1, plan_of("!slow a b c d e f g h i j"), folder_of(tmp_path), console)
    assert len([line for line in console.file.getvalue().splitlines() if "others took" not in line]) == 2


def test_on_a_terminal_there_is_a_live_line(variants, tmp_path):
    console = Console(file=StringIO(), width=200, force_terminal=True)
    run_session(variants[:1], 1, plan_of("!slow a b c d e f g h i j"), folder_of(tmp_path), console)
    assert "tokens/s" in console.file.getvalue()


def test_the_environment_names_what_figures_depend_on():
    found = machine()
    assert found["num_cores"] >= 1
    assert found["cpu"]["model"]
    assert {"numpy", "tritonclient", "noria"} <= set(found["packages"])
    assert 0 <= busy_cores(0.05) < 1000


def test_differences_of_environments_are_named():
    then = {"num_cores": 2, "packages": {"torch": "1", "numpy": "1"}, "gone": 1}
    now = {"num_cores": 4, "packages": {"torch": "2", "numpy": "1"}}
    assert differences(then, now) == ["num_cores: 2, now 4", "packages.torch: 1, now 2", "gone: 1, now None"]
    assert differences(then, then) == []
