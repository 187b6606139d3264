"""Costs measured with made-up steps and from recorded ones. Times are the machine's: nothing here depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from noria.calibration import StepMaker, calibrate
from noria.cli import main
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.recorded_costs import costs_of_samples, shape_of_recorded, step_samples
from noria.runtime.build import build_runner
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.step_shape import StepShape
from noria.timeline.recorded_trace import read_trace
from support.engines import make_request
from support.recordings import record_run
from support.tiny_models import tiny_model_dir

SIZES = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_threads": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def test_a_calibration_covers_what_the_scheduler_makes_and_can_be_kept(model_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(model_dir), preemption="swap", num_host_blocks=20, **SIZES)  # type: ignore[arg-type]
    shares: list[float] = []
    result = calibrate(config, lambda text: None, 0.05, shares.append)
    shapes = [sample.shape for sample in result.samples]
    assert {shape.num_decode_rows for shape in shapes} == {0, 1, 2, 3, 4}
    assert {shape.num_prefill_tokens for shape in shapes} == {0, 2, 4, 8, 16, 32}
    assert any(shape.num_sampled_rows < shape.num_decode_rows for shape in shapes), "no padding"
    assert any(shape.num_decode_rows and shape.num_prefill_tokens for shape in shapes), "nothing mixed"
    assert {shape.num_block_copies for shape in shapes} == {0, 1, 16}
    assert all(sample.seconds > 0 for sample in result.samples)
    assert shares == sorted(shares)
    assert shares[-1] == 1

    path = tmp_path / "costs.json"
    result.cost_model.save(path)
    assert MeasuredCostModel.load(path) == result.cost_model
    # keys and values of 2 layers, 2 heads of 16 numbers of 4 bytes
    assert result.cost_model.origin["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_no_step_exceeds_the_cache_or_the_models_positions(model_dir: Path) -> None:
    config = EngineConfig(model=str(model_dir), **SIZES)  # type: ignore[arg-type]
    runner = build_runner(config, model_dir)
    steps = list(StepMaker(config, runner).steps())
    assert steps
    for step in steps:
        for row in step.rows:
            num_tokens = row.num_computed_tokens + len(row.token_ids)
            assert num_tokens <= min(len(row.block_table) * 4, 512)
        blocks = [block for row in step.rows for block in row.block_table]
        assert len(blocks) == len(set(blocks))
        assert max(blocks) < 64


def test_calibrate_then_simulate(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = ["--model", str(model_dir), "--engine", "max_num_batched_tokens=32", "--engine", "num_kv_blocks=256"]
    assert main(["calibrate", "--seconds", "0.05", *engine]) == 0
    assert "median error" in capsys.readouterr().out
    assert main(["simulate", "--scale", "0.1", *engine]) == 0
    assert "useful output tokens/s" in capsys.readouterr().out


def test_calibrate_from_a_trace(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, costs = tmp_path / "inflight.jsonl", tmp_path / "costs.json"
    record_run(trace, [make_request(range(1, 8), max_tokens) for max_tokens in (5, 9, 3, 7, 6)])
    arguments = ["--from-trace", str(trace), "--output", str(costs), "--model", str(model_dir)]
    assert main(["calibrate", *arguments]) == 0
    assert str(costs) in capsys.readouterr().out
    model = MeasuredCostModel.load(costs)
    # a step of this recording takes a second
    assert model.seconds_of(StepShape(4, 4, 40, num_sampled_rows=4)) == pytest.approx(1, rel=0.05)
    assert str(trace) in model.origin["method"]


def test_recorded_shapes_are_those_of_the_scheduler(tmp_path: Path) -> None:
    requests = [make_request(range(1, 9), 6) for _ in range(5)]
    outputs = record_run(tmp_path / "static", requests, batching_mode="static")
    steps = read_trace(tmp_path / "static").steps
    # the trace holds the rows as they were before `update`, the outputs those after it: shapes by counts
    for step, output in zip(steps, outputs, strict=True):
        shape = shape_of_recorded(step)
        assert shape.num_tokens == output.num_tokens
        assert shape.num_sampled_rows == sum(row.sampling is not None for row in output.rows)
        assert shape.num_decode_rows + (shape.num_prefill_tokens > 0) >= 1
    assert shape_of_recorded(steps[0]).num_prefill_pairs == 4 * 8 * 9 // 2


def test_the_sum_of_what_was_recorded_is_kept(tmp_path: Path) -> None:
    record_run(tmp_path / "trace", [make_request(range(1, 8), 20) for _ in range(9)])
    samples = step_samples(read_trace(tmp_path / "trace").steps)
    # now and then a step is held up
    disturbed = [
        type(sample)(sample.shape, sample.seconds * (5 if place % 10 == 3 else 1))
        for place, sample in enumerate(samples)
    ]
    costs = costs_of_samples(disturbed)
    assert sum(costs.seconds_of(sample.shape) for sample in disturbed) == pytest.approx(
        sum(sample.seconds for sample in disturbed)
    )


def test_too_little_to_fit_to_is_an_error(tmp_path: Path) -> None:
    record_run(tmp_path / "trace", [make_request((1,), 1)])
    with pytest.raises(ConfigError, match="do not suffice"):
        costs_of_samples(step_samples(read_trace(tmp_path / "trace").steps))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--output", "/proc/none/costs.json"], "--output"),
        (["--from-trace", "missing.jsonl"], "cannot read missing.jsonl"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 1
    assert words in capsys.readouterr().err
