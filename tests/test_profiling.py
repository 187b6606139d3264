"""Floors worked out by hand, and profiles whose parts must fit together. Times are the machine's: none is asserted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kernels.cpu_library import STAGES, find_libraries
from noria.models.model_config import load_model_config
from noria.profiling.cases import Case, case_step, check_cases, decode_case, prefill_case
from noria.profiling.floor import MachineLimits, WeightFormat, Work, WorkCounter
from noria.profiling.profiler import (
    MIN_ROUNDS,
    OTHER_PARTS,
    PACKED_WEIGHTS,
    TORCH_PARTS,
    WHOLE_STEP,
    Profile,
    profile,
)
from noria.runtime.build import build_runner
from noria.runtime.model_runner import ModelRunner
from support.cpu_libraries import fastest_instruction_set
from support.tiny_models import tiny_model_dir

SETTINGS: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8, "num_threads": 1, "max_num_seqs": 2}
FLOAT32 = PACKED_WEIGHTS["float32"]
# of the tiny model: 2 layers of q and o (64 x 64), k and v (32 x 64), gate, up and down (96 x 64)
NUM_LINEAR_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
NUM_HEAD_WEIGHTS = 304 * 64
# keys and values of 2 layers, 2 heads of 16 numbers
KV_NUMBERS = 2 * 2 * 2 * 16
# products with keys and values, 2 layers, 4 heads of 16 numbers
MACS_PER_PAIR = 2 * 2 * 4 * 16

needs_compiled_kernels = pytest.mark.skipif(not find_libraries(), reason="the CPU kernels were not built")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return build_runner(EngineConfig(model=str(model_dir), kernels="torch", **SETTINGS), model_dir)


def work_of(
    case: Case,
    runner: ModelRunner,
    weights: WeightFormat = FLOAT32,
    head: WeightFormat = FLOAT32,
    **overrides: Any,
) -> Mapping[str, Work]:
    config = replace(runner.decoder.config, **overrides)
    return WorkCounter(config, weights, head, KV_NUMBERS * 4).parts(case_step(case, runner, 0.0))


def test_the_work_of_a_decode_step(runner: ModelRunner) -> None:
    assert work_of(decode_case(3, 9), runner) == {
        "linear": Work(NUM_LINEAR_WEIGHTS * 4, 3 * NUM_LINEAR_WEIGHTS),
        "head": Work(NUM_HEAD_WEIGHTS * 4, num_head_macs=3 * NUM_HEAD_WEIGHTS),
        "attention": Work(3 * 10 * KV_NUMBERS * 4, 0, 3 * 10 * MACS_PER_PAIR),
    }


def test_the_work_of_a_prompt(runner: ModelRunner) -> None:
    work = work_of(prefill_case(5), runner)
    assert work["linear"] == Work(NUM_LINEAR_WEIGHTS * 4, 5 * NUM_LINEAR_WEIGHTS)
    # only the last token's successor is drawn
    assert work["head"] == Work(NUM_HEAD_WEIGHTS * 4, num_head_macs=NUM_HEAD_WEIGHTS)
    assert work["attention"] == Work(5 * KV_NUMBERS * 4, 0, (1 + 2 + 3 + 4 + 5) * MACS_PER_PAIR)


def test_a_sliding_window_is_all_that_is_read(runner: ModelRunner) -> None:
    assert work_of(decode_case(1, 9), runner, sliding_window=4)["attention"] == Work(
        4 * KV_NUMBERS * 4, 0, 4 * MACS_PER_PAIR
    )
    # of 5 queries the first ones see fewer, and the last does not see the first
    assert work_of(prefill_case(5), runner, sliding_window=4)["attention"] == Work(
        5 * KV_NUMBERS * 4, 0, (1 + 2 + 3 + 4 + 4) * MACS_PER_PAIR
    )
    # queries at 9 to 11 see positions 6 to 11
    chunk = Case("chunk", 1, 3, 9, "")
    assert work_of(chunk, runner, sliding_window=4)["attention"].num_bytes == 6 * KV_NUMBERS * 4


def test_32_weights_share_a_scale_of_two_bytes_and_in_int4_a_minimum(runner: ModelRunner) -> None:
    work = work_of(decode_case(1, 0), runner, PACKED_WEIGHTS["int4"], PACKED_WEIGHTS["int8"])
    assert work["linear"].num_bytes == NUM_LINEAR_WEIGHTS // 2 + NUM_LINEAR_WEIGHTS // 32 * 4
    assert work["head"].num_bytes == NUM_HEAD_WEIGHTS + NUM_HEAD_WEIGHTS // 32 * 2


def test_biases_and_a_head_of_its_own_count(tmp_path: Path) -> None:
    config = load_model_config(tiny_model_dir(tmp_path, "qwen2", tied=False))
    counter = WorkCounter(config, FLOAT32, FLOAT32, 0)
    # of q, k and v
    assert counter.linear_bytes == (NUM_LINEAR_WEIGHTS + 2 * (64 + 32 + 32)) * 4
    assert counter.head_bytes == NUM_HEAD_WEIGHTS * 4


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    limits = MachineLimits(bytes_per_s=100, weight_macs_per_s=20, attention_macs_per_s=10, head_macs_per_s=5)
    reading, computing = Work(300, 20, 10), Work(100, 20, 20)
    assert limits.floor_s(reading) == 3
    assert limits.floor_s(computing) == 1 + 2
    assert limits.floor_s(Work(100, 0, 0, 20)) == 4
    # of a whole step: 4 s of reading, 5 s of computing; not the sum of the parts' floors
    assert limits.floor_s(reading + computing) == 5


def test_rows_have_blocks_of_their_own_and_no_more_than_they_need(runner: ModelRunner) -> None:
    step = case_step(decode_case(3, 16), runner, 0.0)
    assert [list(row.block_table) for row in step.rows] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert all(row.num_computed_tokens == 16 and len(row.token_ids) == 1 for row in step.rows)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (decode_case(22, 16), "--batch 22 with --context 16 needs 66 blocks of 8 tokens, but the cache has 64"),
        (prefill_case(513), "--prefill 513: the model has 512 positions"),
    ],
)
def test_what_does_not_fit_is_named(case: Case, words: str, runner: ModelRunner) -> None:
    with pytest.raises(ConfigError, match=words):
        check_cases([decode_case(1, 1), case], runner)


def check_consistency(result: Profile, cases: list[Case], model_parts: tuple[str, ...]) -> None:
    assert [profiled.case for profiled in result.cases] == cases
    assert result.parts == (*model_parts, *OTHER_PARTS)
    for profiled in result.cases:
        assert len(profiled.runs) >= MIN_ROUNDS
        assert profiled.fastest.whole <= profiled.median_s(WHOLE_STEP)
        for run in profiled.runs:
            # the python part is the rest: were it negative, parts would overlap
            assert all(seconds >= 0 for seconds in run.parts.values()), run
            assert sum(run.parts.values()) == pytest.approx(run.whole)
            assert all(run.parts[part] > 0 for part in (*model_parts, "sampling", "engine"))
    for best, usual in (
        (result.limits.bytes_per_s, result.median_limits.bytes_per_s),
        (result.limits.weight_macs_per_s, result.median_limits.weight_macs_per_s),
        (result.limits.attention_macs_per_s, result.median_limits.attention_macs_per_s),
        (result.limits.head_macs_per_s, result.median_limits.head_macs_per_s),
    ):
        assert best >= usual > 0


def test_a_profile_with_torchs_operators(model_dir: Path) -> None:
    config = EngineConfig(model=str(model_dir), kernels="torch", **SETTINGS)
    shares: list[float] = []
    # more sequences than the configuration has slots
    cases = [decode_case(1, 20), decode_case(4, 20), prefill_case(30)]
    result = profile(config, cases, 0.0, 0.01, lambda text: None, shares.append)
    check_consistency(result, cases, TORCH_PARTS)
    assert (result.kernels, result.weight_dtype, result.kv_dtype) == ("torch", "float32", "float32")
    assert result.weight_bytes == (NUM_LINEAR_WEIGHTS + NUM_HEAD_WEIGHTS) * 4
    assert result.kv_bytes_per_token == KV_NUMBERS * 4
    assert shares == sorted(shares)
    assert shares[-1] == 1


@needs_compiled_kernels
def test_a_profile_of_the_compiled_kernels(model_dir: Path) -> None:
    settings = SETTINGS | {"weight_quantization": "int8", "kv_cache_dtype": "int8", "num_threads": 2}
    cases = [decode_case(2, 20), prefill_case(30)]
    result = profile(EngineConfig(model=str(model_dir), **settings), cases, 1.0, 0.01, lambda text: None)
    check_consistency(result, cases, STAGES)
    assert result.kernels == f"compiled {fastest_instruction_set()}"
    assert (result.num_threads, result.weight_dtype) == (2, "int8")
    assert result.head_dtype == "int8"
    # a scale for each head beside its numbers
    assert (result.kv_dtype, result.kv_bytes_per_token) == ("int8", 2 * 2 * 2 * (16 + 4))


@needs_compiled_kernels
def test_a_profile_with_int4_measures_the_head_apart(model_dir: Path) -> None:
    settings = SETTINGS | {"weight_quantization": "int4", "num_threads": 1}
    cases = [decode_case(2, 20)]
    result = profile(EngineConfig(model=str(model_dir), **settings), cases, 0.0, 0.01, lambda text: None)
    check_consistency(result, cases, STAGES)
    assert (result.weight_dtype, result.head_dtype) == ("int4", "int8")
    assert result.weight_bytes == NUM_LINEAR_WEIGHTS * 20 // 32 + NUM_HEAD_WEIGHTS + 4 * 304
    rates = (result.limits.weight_macs_per_s, result.limits.head_macs_per_s, result.limits.attention_macs_per_s)
    # three measurements, of three kernels
    assert len(set(rates)) == 3
