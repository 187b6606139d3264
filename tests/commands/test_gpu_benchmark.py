"""`benchmarks/gpu.py` without a GPU: all of it runs in the interpreter, and what fails, dies or hangs is a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMAND = BENCHMARKS / "gpu.py"
sys.path.insert(0, str(BENCHMARKS))

from gpu import precompile, stages  # noqa: E402
from gpu.checks import Check, differing_share, evaluate, relative_error  # noqa: E402
from gpu.device import Gpu  # noqa: E402
from gpu.random_models import bytes_read  # noqa: E402
from gpu.rows import Row, table  # noqa: E402
from gpu.sizes import H200, LLAMA_1B, LLAMA_8B, QUICK  # noqa: E402
from gpu.stages import Unit, run_stage  # noqa: E402

STAGES = ["exactness", "attention", "step", "engine", "peers"]
CPU = Gpu(is_interpreted=True)


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # as from a checkout in which nothing is installed
    return subprocess.run(
        [sys.executable, str(COMMAND), *options],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
    )


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        found.setdefault(row["stage"], []).append(row)
    return found


@pytest.mark.slow
def test_all_of_it_runs_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--interpret", "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(path)
    assert list(rows) == STAGES
    assert [row for stage in STAGES for row in rows[stage] if row["error"] or row["verdict"] == "left out"] == []
    assert all(row["is_exact"] for row in rows["exactness"])
    assert all(row["value"] is not None for stage in STAGES[1:] for row in rows[stage])
    # what takes its time in the interpreter neither reaches a target nor misses it
    assert all(row["target"] is None for stage in STAGES for row in rows[stage])
    assert {"in-flight over static, 2 slots", "in-flight over generate_batch"} <= {
        row["name"] for stage in STAGES for row in rows[stage]
    }
    assert "exactness held" in done.stdout
    assert "no time here means anything" in done.stdout


def test_one_stage_runs_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run("--interpret", "--only", "attention", "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["is_interpreted"]
    assert document["versions"]["torch"] == torch.__version__
    assert [row["verdict"] for row in document["rows"]] == [""] * 6
    for row in document["rows"]:
        assert f"| attention | {row['name']} |" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("no NVIDIA GPU that torch can use was found")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "exactness,speed"], "there is no 'speed'; there are exactness, attention, step, engine, peers"),
        (["--output", "/nowhere/gpu.json"], "--output /nowhere/gpu.json cannot be written: No such file or directory"),
    ],
)
def test_a_bad_option_is_named(options: list[str], error: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert error in done.stderr


def stage_of(tmp_path: Path, *units: Unit, seconds: float = 60, check: Callable[[], None] = lambda: None) -> list[Row]:
    return run_stage("exactness", lambda: (units, check), seconds, tmp_path)


def measured(name: str) -> Unit:
    return Unit(name, lambda: [Row("exactness", name, 1.5, is_exact=True)], 0)


def test_a_unit_that_raises_is_a_row_and_the_next_goes_on(tmp_path: Path) -> None:
    def fail() -> list[Row]:
        raise ValueError("no such | tile")

    rows = stage_of(tmp_path, measured("first"), Unit("second", fail, 0), measured("third"))
    assert [(row.name, row.verdict, row.error) for row in rows] == [
        ("first", "exact", ""),
        ("second", "failed", "ValueError: no such | tile"),
        ("third", "exact", ""),
    ]
    assert "| exactness | second |  |  | failed | ValueError: no such \\| tile |" in table(rows)


def test_a_process_that_dies_costs_one_unit(tmp_path: Path) -> None:
    rows = stage_of(tmp_path, measured("first"), Unit("second", lambda: os._exit(9), 0), measured("third"))
    assert {(row.name, row.error) for row in rows} == {
        ("first", ""),
        ("second", "its process ended: exit status 9"),
        ("third", ""),
    }
    assert [row.name for row in rows if row.is_exact] == ["first", "third"]


def test_a_lost_gpu_gets_a_process_anew_for_the_next_unit(tmp_path: Path) -> None:
    """The first unit's own error is kept, and the unit is not blamed twice."""
    marker = tmp_path / "lost"

    def lose() -> list[Row]:
        marker.touch()
        raise RuntimeError("an illegal memory access")

    def check() -> None:
        if marker.exists():
            marker.unlink()
            raise RuntimeError("an illegal memory access")

    rows = stage_of(tmp_path, Unit("first", lose, 0), measured("second"), check=check)
    assert [(row.name, row.error) for row in rows] == [
        ("first", "RuntimeError: an illegal memory access"),
        ("second", ""),
    ]


def test_a_unit_that_hangs_is_ended_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LIMIT_S", 0.5)
    rows = stage_of(tmp_path, Unit("first", lambda: time.sleep(60), 0), measured("second"))
    assert {(row.name, row.error) for row in rows} == {("first", "it took too long"), ("second", "")}


def test_a_stage_that_never_begins_is_a_row(tmp_path: Path) -> None:
    def units() -> Iterator[Unit]:
        raise ValueError("no weights")
        yield

    rows = run_stage("exactness", lambda: (units(), lambda: None), 60, tmp_path)
    assert [(row.name, row.is_exact) for row in rows] == [("its process", False)]


def test_what_does_not_fit_the_time_is_left_out(tmp_path: Path) -> None:
    rows = stage_of(tmp_path, measured("first"), Unit("second", lambda: [], 50), seconds=20)
    assert [(row.name, row.verdict) for row in rows] == [("first", "exact"), ("second", "left out")]
    assert rows[1].note == "20 s were left of the stage's time, and it takes about 50"


def test_an_error_is_what_it_is_of_a_number_and_its_row() -> None:
    expected = torch.tensor([[1.0, -1.0], [1000.0, 1000.0]])
    # 0.5 over 1 + 1, and half a thousandth
    assert relative_error(expected + torch.tensor([[0.5, 0.0], [0.0, 1.0]]), expected) == pytest.approx(0.25)
    assert relative_error(expected * torch.tensor([[1.0, 1.0], [1.002, 1.0]]), expected) == pytest.approx(0.001)
    assert not relative_error(expected.where(expected < 1000, torch.nan), expected) <= 1.0


def test_bits_differ_where_values_do_not() -> None:
    zeros = torch.zeros(4)
    assert differing_share(zeros, torch.tensor([0.0, -0.0, 0.0, 0.0])) == 0.25
    assert differing_share(torch.full((2,), torch.nan), torch.full((2,), torch.nan)) == 0


def test_nan_meets_no_tolerance() -> None:
    outcome = evaluate(Check("", lambda: torch.full((3,), torch.nan), lambda: torch.ones(3), 1e9), CPU)
    assert not outcome.is_met


def test_the_bytes_of_a_decode_step_are_those_of_the_models_cards() -> None:
    """1.24 and 8.03 billion weights; the larger model's embedding, which is not its head, is not read."""
    assert bytes_read(LLAMA_1B, 2) == pytest.approx(2 * 1.236e9, rel=1e-3)
    assert bytes_read(LLAMA_8B, 2) == pytest.approx(2 * (8.030e9 - 128256 * 4096), rel=1e-3)
    assert bytes_read(LLAMA_8B, 1) == pytest.approx(bytes_read(LLAMA_8B, 2) / 2, rel=1e-3)


def test_every_stage_of_kernels_has_what_is_compiled_ahead() -> None:
    gpu = Gpu(is_interpreted=False)
    for stage in ("exactness", "attention", "step"):
        names = [task.name for task in precompile.tasks(H200, gpu, False, [stage])]
        assert len(set(names)) == len(names) > 0
        assert len(precompile.tasks(QUICK, gpu, True, [stage])) <= len(names)
    assert precompile.tasks(H200, gpu, False, ["peers"]) == []
