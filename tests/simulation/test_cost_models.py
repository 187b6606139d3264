"""Cost models: the measured one's formula, file and fit, and the analytic one's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noria.errors import ConfigError
from noria.sampling_params import SamplingParams
from noria.scheduler_output import BlockCopy, SamplingInput, ScheduledSequence, SchedulerOutput
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel, decode_points
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.fit import fit_cost_model, non_negative_least_squares
from noria.simulation.step_shape import StepSample, StepShape

MODEL = MeasuredCostModel(
    linear_table=((1, 0.0), (8, 0.014), (64, 0.042), (256, 0.234)),
    constant_s=0.02,
    per_decode_row_s=3e-4,
    per_decode_context_s=2e-6,
    per_prefill_pair_s=4e-7,
    per_sampled_row_s=1e-3,
)


def row(num_tokens: int, num_before: int, is_sampled: bool, is_padding: bool = False) -> ScheduledSequence:
    sampling = SamplingInput(SamplingParams(), 0, num_before + num_tokens) if is_sampled else None
    return ScheduledSequence(1, [7] * num_tokens, num_before, [], sampling, is_padding)


def test_the_shape_of_a_step() -> None:
    rows = (row(1, 9, True), row(1, 4, False, is_padding=True), row(3, 10, False), row(2, 0, True))
    copies = (BlockCopy(0, 1, is_swap_in=False),)
    assert StepShape.of(SchedulerOutput(1, rows, copies)) == StepShape(
        num_tokens=7,
        num_decode_rows=2,
        num_decode_context=10 + 5,
        num_prefill_tokens=5,
        num_prefill_context=13 + 2,
        # the first new token attends to the 10 before it and itself, the second to one more, and so on
        num_prefill_pairs=(11 + 12 + 13) + (1 + 2),
        num_sampled_rows=2,
        num_block_copies=1,
    )


@pytest.mark.parametrize(
    ("num_tokens", "linear_s"),
    [(1, 0.0), (2, 0.002), (8, 0.014), (36, 0.028), (64, 0.042), (160, 0.138), (256, 0.234), (356, 0.334)],
)
def test_the_linear_table_is_read_along_its_lines_and_beyond_its_end(num_tokens: int, linear_s: float) -> None:
    assert MODEL.seconds_of(StepShape(num_tokens)) == pytest.approx(0.02 + linear_s)


def test_the_terms_of_a_step() -> None:
    output = SchedulerOutput(1, (row(1, 99, True), row(7, 0, False)))
    assert MODEL.step_time_s(output) == pytest.approx(0.02 + 0.014 + 3e-4 + 100 * 2e-6 + 28 * 4e-7 + 1e-3)
    assert MeasuredCostModel(((4, 0.5),)).step_time_s(output) == 0.5


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "cost.json")
    assert MeasuredCostModel.load(tmp_path / "cost.json") == MODEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be"),
        ({"per_token_s": 1}, "unknown field 'per_token_s'; valid are linear_table, constant_s"),
        ({"constant_s": "1"}, "constant_s must be a finite number from 0, not '1'"),
        ({"per_decode_row_s": -1}, "per_decode_row_s must be a finite"),
        ({"linear_table": None}, "linear_table must be a list of"),
        ({"linear_table": []}, "at least one entry"),
        ({"linear_table": [[1.5, 0.1]]}, r"linear_table\[0\]: num_tokens must be a whole"),
        ({"linear_table": [[1, 0.1], [1, 0.2]]}, r"linear_table\[1\]: num_tokens must grow"),
        ({"linear_table": [[1, 0.2], [2, 0.1]]}, r"linear_table\[1\].* seconds not shrink"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredCostModel.from_dict(MODEL.to_dict() | change)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    with pytest.raises(ConfigError, match=r"cannot read .*cost\.json"):
        MeasuredCostModel.load(path)
    path.write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match=r"cost\.json: format and version"):
        MeasuredCostModel.load(path)


def measured_steps(
    rng: np.random.Generator, noise: float, outlier_share: float, num_repeats: int = 5
) -> list[StepSample]:
    """Steps as a calibration would run them, timed on a machine that others disturb."""
    shapes = []
    for num_rows in (1, 2, 8, 16, 64):
        for context in (16, 128, 512):
            shapes.append(StepShape(num_rows, num_rows, num_rows * context, num_sampled_rows=num_rows))
    for num_tokens in (8, 64, 160, 256):
        for num_before in (0, 256, 1024):
            pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
            context = num_before + num_tokens
            for num_sampled in (0, 1):
                shapes.append(StepShape(num_tokens, 0, 0, num_tokens, context, pairs, num_sampled))
    samples = []
    for shape in shapes * num_repeats:
        slowdown = rng.lognormal(0, noise) * (rng.uniform(2, 10) if rng.random() < outlier_share else 1)
        samples.append(StepSample(shape, MODEL.seconds_of(shape) * slowdown))
    return samples


def test_a_fit_finds_the_coefficients_of_exact_samples() -> None:
    found = fit_cost_model(measured_steps(np.random.default_rng(0), noise=0.0, outlier_share=0.0))
    for num_tokens in (1, 8, 64, 256):
        assert found.seconds_of(StepShape(num_tokens)) == pytest.approx(MODEL.seconds_of(StepShape(num_tokens)))
    for name in ("constant_s", "per_decode_context_s", "per_prefill_pair_s", "per_decode_row_s", "per_sampled_row_s"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=1e-6), name
    assert found.median_relative_error == pytest.approx(0, abs=1e-9)
    assert found.per_block_copy_s == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_finds_the_seconds_through_noise_and_outliers(seed: int) -> None:
    samples = measured_steps(np.random.default_rng(seed), noise=0.05, outlier_share=0.1)
    found = fit_cost_model(samples)
    errors = [abs(found.seconds_of(one.shape) / MODEL.seconds_of(one.shape) - 1) for one in samples]
    assert np.median(errors) < 0.03
    assert max(errors) < 0.15
    assert found.per_prefill_pair_s == pytest.approx(MODEL.per_prefill_pair_s, rel=0.15)
    assert found.per_decode_context_s == pytest.approx(MODEL.per_decode_context_s, rel=0.3)
    assert found.median_relative_error is not None
    assert 0.001 < found.median_relative_error < 0.05


def test_a_fit_does_not_follow_outliers_that_nothing_was_repeated_against() -> None:
    exact = measured_steps(np.random.default_rng(0), noise=0.0, outlier_share=0.0, num_repeats=1)
    samples = [StepSample(one.shape, one.seconds * (3 if place % 8 == 0 else 1)) for place, one in enumerate(exact)]
    found = fit_cost_model(samples)
    errors = [abs(found.seconds_of(one.shape) / one.seconds - 1) for one in exact]
    assert np.median(errors) < 0.02


def test_a_fit_needs_more_than_one_shape() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fit_cost_model([StepSample(StepShape(1), 0.1)] * 9)


def test_least_squares_keep_to_what_is_not_negative() -> None:
    rng = np.random.default_rng(5)
    design, target = rng.normal(size=(30, 6)), rng.normal(size=30)
    solution = non_negative_least_squares(design, target)
    gradient = design.T @ (target - design @ solution)
    # the conditions of Karush, Kuhn and Tucker
    assert (solution >= 0).all()
    assert (gradient < 1e-8).all()
    assert np.abs(gradient[solution > 0]).max() < 1e-8
    assert 0 < (solution > 0).sum() < 6


def test_a_7b_model_on_an_h100_reads_14_gb_a_token_and_hardly_computes() -> None:
    model = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-2-7B"])
    (point,) = decode_points(model, [1], [1024])
    assert point.step_s == pytest.approx(4.2e-3, rel=0.03)
    assert point.tokens_per_s == pytest.approx(240, rel=0.03)
    assert point.arithmetic_share < 0.01
    assert (point.bound, point.bandwidth_share, point.fits_memory) == ("weights", 1.0, True)


def test_sharing_one_read_of_the_weights_carries_until_the_cache_or_the_arithmetic_takes_over() -> None:
    model = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-2-7B"])
    long = decode_points(model, [1, 16, 64, 256], [2048])
    assert [point.bound for point in long] == ["weights", "kv", "kv", "kv"]
    assert [point.fits_memory for point in long] == [True, True, False, False]
    short = decode_points(model, [1, 16, 64, 512], [16])
    assert [point.bound for point in short] == ["weights", "weights", "weights", "arithmetic"]
    assert short[1].tokens_per_s / short[0].tokens_per_s == pytest.approx(16, rel=0.02)
    assert short[3].arithmetic_share == 1


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.2-1B", 1_235_814_400),
        ("SmolLM2-135M", 134_515_008),
    ],
)
def test_the_models_have_as_many_parameters_as_published(name: str, num_weights: int) -> None:
    assert MODEL_SHAPES[name].num_weights == num_weights


def test_blocks_that_fit_beside_the_weights() -> None:
    model = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-2-7B"])
    # 72 GB less 13.48 GB of weights, at 512 KiB a token
    assert model.num_kv_blocks(block_size=16) == int((72e9 - 2 * 6_738_415_616) / (16 * 2**19))
    with pytest.raises(ValueError, match="weights do not fit"):
        AnalyticCostModel(CHIPS["L4"], MODEL_SHAPES["Llama-3.1-8B"]).num_kv_blocks(16, memory_share=0.5)
