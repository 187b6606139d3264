"""An engine around a model runner, without tokenizer or server, and requests of random tokens for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.config import EngineConfig
from noria.engine.engine import Engine
from noria.engine.metrics import StatsCounter
from noria.runtime.model_runner import ModelRunner
from noria.sampling_params import SamplingParams
from noria.scheduler_output import PendingStep, SchedulerOutput, StepResult
from noria.scheduling.build import build_scheduler
from noria.sequence import Request
from noria_bench.workload import seed_workload


class NoText:
    """A tokenizer whose every token is one letter: text costs next to nothing and is not measured."""

    special_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "x" * len(token_ids)


@dataclass(frozen=True)
class Item:
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class EngineRun:
    """token_ids: of the answers, in the order of the items. replayed_steps: that a graph took."""

    seconds: float
    token_ids: list[list[int]]
    num_steps: int
    num_replayed_steps: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def seed_mix(num_requests: int, vocab_size: int, scale: float = 1.0, seed: int = 0) -> list[Item]:
    """The lengths of noria_bench's seed workload; random tokens, so that no two prompts begin alike."""
    rng = np.random.default_rng(seed)
    items = []
    for item in seed_workload(num_requests, scale=scale, seed=seed).items:
        tokens = rng.integers(3, vocab_size, item.num_prompt_tokens).tolist()
        items.append(Item(tuple(tokens), item.max_tokens))
    return items


def engine_config(mode: str, slots: int, max_num_batched_tokens: int, **values: Any) -> EngineConfig:
    return EngineConfig(
        batching_mode=mode,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, max_num_batched_tokens),
        max_queue_size=2**20,
        **values,
    )


def run_engine(runner: ModelRunner, config: EngineConfig, items: Sequence[Item]) -> EngineRun:
    """All at once; greedy, to the last of max_tokens. Raises the error of a request that fails."""
    scheduler = build_scheduler(config, runner.cache.num_blocks)
    counted = _Counted(runner)
    runs_ahead = config.run_ahead and config.batching_mode == "inflight" and runner.can_run_ahead
    counter = StatsCounter(runner.cache.num_blocks, config.block_size)
    engine = Engine(scheduler, counted, NoText(), counter, ahead=counted if runs_ahead else None)
    answers: list[list[int]] = [[] for _ in items]
    started = time.perf_counter()
    for index, item in enumerate(items):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.max_tokens)
        # in a closed mode, batches of consecutive items, as Triton forms them of requests that wait
        batch_id = index // config.max_num_seqs
        engine.add(Request(index, item.prompt_token_ids, params, seed=0, batch_id=batch_id))
    while engine.has_work:
        engine.step()
        for output in engine.take_outputs():
            if output.error is not None:
                raise output.error
            answers[output.request_id].extend(token.token_id for token in output.tokens)
    seconds = time.perf_counter() - started
    engine.check_integrity()
    for item, answer in zip(items, answers, strict=True):
        assert len(answer) == item.max_tokens, f"{len(answer)} tokens in place of {item.max_tokens}"
    return EngineRun(seconds, answers, counted.num_steps, counted.num_replayed_steps)


class _Counted:
    """The runner, and how many of its steps a graph could take: those in which every row has one token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_steps = 0
        self.num_replayed_steps = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._count(output)
        return self._runner.execute(output)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        self._count(output)
        return self._runner.submit(output)

    def _count(self, output: SchedulerOutput) -> None:
        self.num_steps += bool(output.rows)
        if self._runner.graphs is not None and output.rows:
            is_decode = all(len(row.token_ids) == 1 for row in output.rows)
            self.num_replayed_steps += is_decode and len(output.rows) <= self._runner.graphs.sizes[-1]
