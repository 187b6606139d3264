"""The steps that are profiled: decodes of so many sequences, or one prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from noria.errors import ConfigError
from noria.runtime.model_runner import ModelRunner
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Case:
    """num_rows sequences, each with num_tokens new tokens after num_cached ones; one more is drawn for each.

    option: what asked for it, for errors.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_cached: int
    option: str


def decode_case(num_rows: int, num_cached: int) -> Case:
    name = f"{num_rows} sequence{'s' if num_rows > 1 else ''}"
    return Case(name, num_rows, 1, num_cached, f"--batch {num_rows} with --context {num_cached}")


def prefill_case(num_tokens: int) -> Case:
    return Case(f"prefill {num_tokens}", 1, num_tokens, 0, f"--prefill {num_tokens}")


def check_cases(cases: Sequence[Case], runner: ModelRunner) -> None:
    """Raises ConfigError, naming the option, for what exceeds the model's positions or the cache."""
    cache, max_len = runner.cache, runner.decoder.config.max_position_embeddings
    for case in cases:
        num_tokens = case.num_cached + case.num_tokens
        if num_tokens > max_len:
            raise ConfigError(f"{case.option}: the model has {max_len} positions, not {num_tokens}")
        num_blocks = case.num_rows * _blocks_per_row(case, cache.block_size)
        if num_blocks > cache.num_blocks:
            raise ConfigError(
                f"{case.option} needs {num_blocks} blocks of {cache.block_size} tokens, but the cache has "
                f"{cache.num_blocks}: raise kv_cache_gib or num_kv_blocks"
            )


def case_step(case: Case, runner: ModelRunner, temperature: float) -> SchedulerOutput:
    """With random tokens. Blocks lie as those of sequences that grew side by side."""
    rng = random.Random(0)
    num_blocks = _blocks_per_row(case, runner.cache.block_size)
    sampling = SamplingParams(max_tokens=2**20, temperature=temperature)
    return SchedulerOutput(
        step=0,
        rows=tuple(
            ScheduledSequence(
                request_id=index,
                token_ids=rng.choices(range(runner.decoder.config.vocab_size), k=case.num_tokens),
                num_computed_tokens=case.num_cached,
                block_table=[block * case.num_rows + index for block in range(num_blocks)],
                sampling=SamplingInput(sampling, seed=index, position=case.num_cached + case.num_tokens),
            )
            for index in range(case.num_rows)
        ),
    )


def _blocks_per_row(case: Case, block_size: int) -> int:
    return -(-(case.num_cached + case.num_tokens) // block_size)
