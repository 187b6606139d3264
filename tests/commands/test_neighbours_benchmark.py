"""benchmarks/neighbours.py on a tiny random model: what runs beside the steps, how many count, what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from noria.runtime.model_runner import ModelRunner
from noria.scheduler_output import SchedulerOutput, StepResult
from support.tiny_models import tiny_model_dir

# where `python benchmarks/neighbours.py` lies
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import neighbours


def test_every_number_of_neighbours_has_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(popen(command))
        return started[-1]

    def execute(runner: ModelRunner, step: SchedulerOutput) -> StepResult:
        alive.append(sum(process.poll() is None for process in started))
        return original(runner, step)

    alive: list[int] = []
    original = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", execute)
    monkeypatch.setattr(neighbours, "Popen", start)
    monkeypatch.setattr(neighbours, "SETTLE_S", 0)
    model_dir, path = tiny_model_dir(tmp_path / "model", "llama"), tmp_path / "steps.json"
    options = ["--model", str(model_dir), "--engine", "num_kv_blocks=64", "--engine", "num_threads=1"]
    options += ["--neighbours", "0,2", "--steps", "10", "--batch", "3", "--context", "20", "--json", str(path)]
    assert neighbours.main(options) == 0
    # two in each round, none of which lives on
    assert len(started) == 2 * neighbours.NUM_ROUNDS
    assert all(process.poll() is not None for process in started)
    num_steps = 10 + neighbours.NUM_ROUNDS * neighbours.NUM_UNCOUNTED
    assert sorted(alive) == [0] * num_steps + [2] * num_steps
    content, out = json.loads(path.read_text()), capsys.readouterr().out
    assert {count: len(times) for count, times in content["steps_ms"].items()} == {"0": 10, "2": 10}
    for count, times in content["steps_ms"].items():
        summary = content["summary"][count]
        assert sorted(times)[4] <= summary["median_ms"] <= sorted(times)[5]
        assert summary["max_ms"] == max(times)
        assert f"| {count} | {summary['median_ms']:.1f} | " in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--neighbours=-1"], "must be numbers of processes, not -1"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--json", "/nowhere/steps.json"], "--json /nowhere/steps.json cannot be written"),
        (["--engine", "num_threads=none"], "num_threads"),
        (["--context", "600"], "--context 600: the model has 512 positions"),
    ],
)
def test_what_cannot_be_is_named(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = tiny_model_dir(tmp_path / "model", "llama")
    with pytest.raises(SystemExit) as exit_info:
        neighbours.main(["--model", str(model_dir), "--engine", "num_kv_blocks=64", *words])
    assert exit_info.value.code == 2
    assert error in capsys.readouterr().err
