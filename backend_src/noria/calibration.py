"""Measures how long the engine's steps take on this machine, for the simulator, with steps made up for the purpose.

Shows what the machine can do while nothing disturbs it: each shape is run many times, in turn with all the others, and
its median counts. What serving costs on the same cores is not in it; `recorded_costs` finds that from traces.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from noria.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.engine.text import TextTokenizer
from noria.models.model_config import load_model_config
from noria.models.model_store import resolve_model
from noria.models.tokenizer import load_tokenizer
from noria.runtime.build import build_runner
from noria.runtime.dtypes import kv_dtype
from noria.runtime.kv_cache import bytes_per_block
from noria.runtime.model_runner import ModelRunner
from noria.sampling_params import SamplingParams
from noria.scheduler_output import (
    BlockCopy,
    SampledToken,
    SamplingInput,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)
from noria.scheduling.build import build_scheduler
from noria.sequence import Request
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.fit import fit_cost_model
from noria.simulation.step_shape import StepSample, StepShape

# cached tokens of a row, as far as the cache holds as many for all rows
CONTEXTS = (0, 127, 511, 2047)
CHUNK_CONTEXTS = (0, 1024)
MIXED_CHUNKS = (16, 128)
NUM_COPIED_BLOCKS = (1, 16, 64)
MIN_ROUNDS = 3
NUM_OVERHEAD_STEPS = 64

_SAMPLING = SamplingParams(max_tokens=2**20, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """cost_model: what to keep. samples: one for each step that was run, its median, with the engine's own work."""

    cost_model: MeasuredCostModel
    samples: tuple[StepSample, ...]


def calibrate(
    config: EngineConfig,
    say: Callable[[str], None],
    seconds: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Run steps of all the shapes that the scheduler makes for about `seconds`, and fit a cost model to their times.

    Loads the model in this process. on_progress: told which share is done. Raises ConfigError.
    """
    model_dir = _model_dir(config, say)
    say(f"loading {model_dir}")
    runner = build_runner(config, model_dir)
    runner.warm_up(config.max_num_seqs, config.max_num_batched_tokens)
    step_s, row_s = engine_overhead(config, load_tokenizer(model_dir))
    measured = _measure(runner, list(StepMaker(config, runner).steps()), seconds, on_progress)
    samples = [
        StepSample(shape, step_seconds + step_s + row_s * shape.num_sampled_rows) for shape, step_seconds in measured
    ]
    origin = describe_origin(config, say) | {"method": "synthetic steps"}
    return Calibration(replace(fit_cost_model(samples), origin=origin), tuple(samples))


def describe_origin(config: EngineConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """A cost model's `origin`, but for how it was measured. Raises ConfigError."""
    model = load_model_config(_model_dir(config, say))
    return {
        "model": config.model,
        "dtype": config.dtype,
        "num_threads": config.num_threads or len(os.sched_getaffinity(0)),
        "machine": f"{platform.node()}, {platform.machine()}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kv_bytes_per_token": bytes_per_block(model, config.block_size, kv_dtype(config)) / config.block_size,
    }


def _model_dir(config: EngineConfig, say: Callable[[str], None]) -> Path:
    return resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, say)


class StepMaker:
    """Makes steps of the sizes that the scheduler of `config` makes, for a runner with its cache."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._block_size = runner.cache.block_size
        self._num_blocks = runner.cache.num_blocks
        self._num_host_blocks = runner.num_host_blocks
        self._max_len = runner.decoder.config.max_position_embeddings

    def steps(self) -> Iterator[SchedulerOutput]:
        """Decodes of growing batches and contexts, prompts of growing chunks and depths, both in one, padding, copies.

        What would not fit into the cache or the model's positions is left out.
        """
        full, contexts = self._max_num_seqs, self._contexts(CONTEXTS, self._max_num_seqs, 1)
        for num_rows in _doubling(1, full):
            for context in contexts:
                yield self._step([(1, context, True)] * num_rows)
        # a closed batch that is almost over
        for context in contexts:
            yield self._step([(1, context, True)] + [(1, context, False)] * (full - 1))
        for num_tokens in _doubling(2, self._max_tokens):
            for context in self._contexts(CHUNK_CONTEXTS, 1, num_tokens):
                yield self._step([(num_tokens, context, True)])
        decodes = [(1, contexts[-1], True)] * (full - 1)
        for num_tokens in MIXED_CHUNKS:
            if full > 1 and num_tokens + full <= self._max_tokens and self._contexts((contexts[-1],), full, num_tokens):
                yield self._step([*decodes, (num_tokens, 0, False)])
        for num_copies in NUM_COPIED_BLOCKS:
            if num_copies <= min(self._num_host_blocks, self._num_blocks):
                yield self._step([(1, 0, True)], num_copies)

    def _contexts(self, wanted: Sequence[int], num_rows: int, num_tokens: int) -> list[int]:
        longest = min(self._max_len, self._num_blocks // num_rows * self._block_size) - num_tokens
        return [context for context in wanted if context <= longest]

    def _step(self, rows: Sequence[tuple[int, int, bool]], num_copies: int = 0) -> SchedulerOutput:
        """rows: new tokens, tokens before them, and whether one is drawn; a decode without is padding."""
        # apart from each other, as sequences' are
        num_blocks = self._num_blocks // len(rows)
        return SchedulerOutput(
            step=0,
            rows=tuple(
                ScheduledSequence(
                    request_id=index,
                    token_ids=[0] * num_tokens,
                    num_computed_tokens=context,
                    block_table=range(index * num_blocks, (index + 1) * num_blocks),
                    sampling=SamplingInput(_SAMPLING, seed=0, position=context + num_tokens) if is_drawn else None,
                    is_padding=num_tokens == 1 and not is_drawn,
                )
                for index, (num_tokens, context, is_drawn) in enumerate(rows)
            ),
            block_copies=tuple(BlockCopy(block, block, block % 2 == 1) for block in range(num_copies)),
        )


def _doubling(start: int, end: int) -> list[int]:
    """start, 2 start, 4 start, ... below end, and end; empty if that is below start."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= 2
    return [*sizes, end] if end >= (sizes or [start])[0] else []


def _measure(
    runner: ModelRunner, steps: Sequence[SchedulerOutput], seconds: float, on_progress: Callable[[float], None]
) -> list[tuple[StepShape, float]]:
    """The median seconds of each step. All are run in every round, in another order, so that what disturbs the machine
    for a while does not fall on some of them only."""
    times: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    rng = random.Random(0)
    start_s = time.perf_counter()
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or time.perf_counter() - start_s < seconds:
        rng.shuffle(order)
        for num_done, place in enumerate(order, start=1):
            begin_s = time.perf_counter()
            runner.execute(steps[place])
            times[place].append(time.perf_counter() - begin_s)
            share_of_rounds = (num_rounds + num_done / len(order)) / MIN_ROUNDS
            on_progress(min(share_of_rounds, (time.perf_counter() - start_s) / seconds, 1.0))
        num_rounds += 1
    return [(StepShape.of(step), median(own)) for step, own in zip(steps, times, strict=True)]


class _InstantRunner:
    """Draws the same token for every row."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        return {row.request_id: SampledToken(0) for row in output.rows if row.sampling is not None}


def engine_overhead(config: EngineConfig, tokenizer: TextTokenizer) -> tuple[float, float]:
    """Seconds that scheduling, updating and text take of a step, and of each row in it: medians of decode steps."""
    num_rows = max(2, config.max_num_seqs)
    one_s, all_s = (_decode_overhead(config, tokenizer, num) for num in (1, num_rows))
    row_s = max(0.0, (all_s - one_s) / (num_rows - 1))
    return max(0.0, one_s - row_s), row_s


def _decode_overhead(config: EngineConfig, tokenizer: TextTokenizer, num_rows: int) -> float:
    config = replace(config, batching_mode="inflight", max_num_seqs=num_rows, preemption="recompute")
    num_tokens = NUM_OVERHEAD_STEPS + 1
    num_blocks = num_rows * (num_tokens // config.block_size + 2) * 2
    scheduler = build_scheduler(config, num_blocks)
    engine = Engine(scheduler, _InstantRunner(), tokenizer, StatsCounter(num_blocks, config.block_size))
    for index in range(num_rows):
        engine.add(Request(index, (index,), replace(_SAMPLING, max_tokens=num_tokens), seed=0))
    # the prompts
    engine.step()
    times = []
    for _ in range(NUM_OVERHEAD_STEPS):
        begin_s = time.perf_counter()
        engine.step()
        engine.take_outputs()
        times.append(time.perf_counter() - begin_s)
    return median(times)
