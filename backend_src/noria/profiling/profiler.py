"""Profiles steps of the engine on this machine's CPU: how long their parts take, beside the floor of each.

Runs the very runner that serves, on steps made up for the purpose. What scheduling and text take is measured apart,
without the model, and added. Knows nothing of the response path: that is a server's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import cast

import torch
from torch import Tensor

from noria.calibration import engine_overhead
from noria.config import EngineConfig
from noria.engine.text import TextTokenizer
from noria.errors import ConfigError
from noria.kernels.cpu_library import PACKED_BYTES, PANEL, STAGES
from noria.models.cpu_decoder import CpuDecoder
from noria.models.decoder import Decoder, DecoderInput
from noria.models.model_store import resolve_model
from noria.models.tokenizer import load_tokenizer
from noria.profiling.cases import Case, case_step, check_cases
from noria.profiling.floor import MachineLimits, WeightFormat, Work, WorkCounter
from noria.profiling.limits import LimitMeter, compiled_limits, torch_limits
from noria.runtime.build import build_runner
from noria.runtime.kv_cache import bytes_per_block
from noria.runtime.model_runner import ModelRunner
from noria.scheduler_output import SchedulerOutput

MIN_ROUNDS = 3
# the model's parts where torch's operators compute it, which do not tell them apart
TORCH_PARTS = ("model",)
OTHER_PARTS = ("sampling", "python", "engine")
WHOLE_STEP = "step"
# as the compiled kernels pack them, with the scales of 32 weights
PACKED_WEIGHTS = {
    "float32": WeightFormat("float32", per_weight=4, per_bias=4),
} | {
    name: WeightFormat(name, per_weight=num_bytes / (num_inputs * PANEL), per_bias=4)
    for name, (num_inputs, num_bytes) in PACKED_BYTES.items()
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One run of a step, in seconds. whole: the sum of parts, which are the model's and OTHER_PARTS.

    sampling: drawing the tokens. python: the tensors of the batch, and what the forward pass takes beside its parts.
    engine: scheduling, updating and text.
    """

    whole: float
    parts: Mapping[str, float]

    def seconds(self, part: str) -> float:
        """part: WHOLE_STEP, or one of parts."""
        return self.whole if part == WHOLE_STEP else self.parts[part]


@dataclass(frozen=True, slots=True)
class ProfiledCase:
    """work: of the parts that have a floor. runs: in the order in which they were made."""

    case: Case
    work: Mapping[str, Work]
    runs: tuple[StepTimes, ...]

    def work_of(self, part: str) -> Work:
        return sum(self.work.values(), Work()) if part == WHOLE_STEP else self.work[part]

    def median_s(self, part: str) -> float:
        return median(run.seconds(part) for run in self.runs)

    @property
    def fastest(self) -> StepTimes:
        """A part's own least would be too little: a thread that wakes late finds that others have done its share, and
        counts the time before to the part at whose end it slept."""
        return min(self.runs, key=lambda run: run.whole)


@dataclass(frozen=True, slots=True)
class Profile:
    """limits: the best that was seen of each, which floors are made of. median_limits: the medians, to tell a machine
    that others disturb. weight_bytes: what a step reads of weights."""

    kernels: str
    num_threads: int
    weight_dtype: str
    head_dtype: str
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: float
    limits: MachineLimits
    median_limits: MachineLimits
    cases: tuple[ProfiledCase, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.cases[0].runs[0].parts)


def profile(
    config: EngineConfig,
    cases: Sequence[Case],
    temperature: float,
    seconds: float,
    say: Callable[[str], None],
    on_progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Run each case for about `seconds` in all, at least MIN_ROUNDS times, in turn with all the others.

    Loads the model in this process. cases: at least one. on_progress: told which share is done. Raises ConfigError.
    """
    model_dir = resolve_model(config.model, Path(config.cache_dir) if config.cache_dir else None, config.dtype, say)
    say(f"loading {model_dir}")
    runner = build_runner(config, model_dir)
    decoder, kv_dtype = runner.decoder, runner.cache.memory.dtype
    if decoder.device.type != "cpu":
        raise ConfigError(f"device must be cpu for a profile, not {decoder.device.type}")
    check_cases(cases, runner)
    engine_s = _engine_seconds(config, cases, load_tokenizer(model_dir))
    weights, head = _weight_formats(decoder)
    kv_bytes_per_token = bytes_per_block(decoder.config, config.block_size, kv_dtype) / config.block_size
    counter = WorkCounter(decoder.config, weights, head, kv_bytes_per_token)
    if isinstance(decoder, CpuDecoder):
        num_threads, meter = decoder.num_threads, compiled_limits(decoder.num_threads, weights.name, head.name)
    else:
        num_threads, meter = torch.get_num_threads(), torch_limits(decoder.dtype)
    steps = [case_step(case, runner, temperature) for case in cases]
    rounds = _Rounds(_StepTimer(runner), steps, meter)
    rounds.run(seconds, on_progress)
    return Profile(
        kernels=f"compiled {decoder.instruction_set}" if isinstance(decoder, CpuDecoder) else "torch",
        num_threads=num_threads,
        weight_dtype=weights.name,
        head_dtype=head.name,
        weight_bytes=counter.linear_bytes + counter.head_bytes,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_bytes_per_token=kv_bytes_per_token,
        limits=_each(max, rounds.limits),
        median_limits=_each(median, rounds.limits),
        cases=tuple(
            ProfiledCase(case, counter.parts(step), tuple(_with_engine(run, own_engine_s) for run in runs))
            for case, step, runs, own_engine_s in zip(cases, steps, rounds.runs, engine_s, strict=True)
        ),
    )


def _engine_seconds(config: EngineConfig, cases: Sequence[Case], tokenizer: TextTokenizer) -> list[float]:
    """What scheduling, updating and text take of a step of each case."""
    num_rows = max(case.num_rows for case in cases)
    # which may be more than the configuration has slots
    config = replace(config, max_num_seqs=num_rows, max_num_batched_tokens=max(num_rows, config.max_num_batched_tokens))
    step_s, row_s = engine_overhead(config, tokenizer)
    return [step_s + row_s * case.num_rows for case in cases]


def _weight_formats(decoder: Decoder | CpuDecoder) -> tuple[WeightFormat, WeightFormat]:
    """Of the layers, and of the head."""
    if isinstance(decoder, CpuDecoder):
        return PACKED_WEIGHTS[decoder.format.weights], PACKED_WEIGHTS[decoder.format.head]
    size = decoder.dtype.itemsize
    weights = WeightFormat(str(decoder.dtype).removeprefix("torch."), size, size)
    return weights, weights


def _each(choose: Callable[[Sequence[float]], float], limits: Sequence[MachineLimits]) -> MachineLimits:
    return MachineLimits(
        choose([one.bytes_per_s for one in limits]),
        choose([one.weight_macs_per_s for one in limits]),
        choose([one.attention_macs_per_s for one in limits]),
        choose([one.head_macs_per_s for one in limits]),
    )


def _with_engine(run: StepTimes, engine_s: float) -> StepTimes:
    return StepTimes(run.whole + engine_s, {**run.parts, "engine": engine_s})


class _TimedDecoder:
    """Stands for a decoder, and notes when its forward pass began and ended. begin_s, end_s: of the last."""

    def __init__(self, decoder: Decoder | CpuDecoder) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.device = decoder.device
        self.begin_s = self.end_s = 0.0

    def forward(self, batch: DecoderInput, kv_layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        self.begin_s = time.perf_counter()
        logits = self._decoder.forward(batch, kv_layers)
        self.end_s = time.perf_counter()
        return logits


class _StepTimer:
    """Runs steps of a runner, which is this one's from now on, and tells their parts apart."""

    def __init__(self, runner: ModelRunner) -> None:
        self._decoder = runner.decoder
        self._timed = _TimedDecoder(self._decoder)
        # it has all of a decoder that a step needs
        runner.decoder = cast(Decoder, self._timed)
        self._runner = runner

    def run(self, step: SchedulerOutput) -> StepTimes:
        """Without the part `engine`."""
        compiled = self._decoder if isinstance(self._decoder, CpuDecoder) else None
        if compiled is not None:
            compiled.reset_stages()
        begin_s = time.perf_counter()
        self._runner.execute(step)
        end_s = time.perf_counter()
        if compiled is not None and compiled.stage_seconds is not None:
            model = dict(zip(STAGES, compiled.stage_seconds, strict=True))
        else:
            model = dict.fromkeys(TORCH_PARTS, self._timed.end_s - self._timed.begin_s)
        whole, sampling = end_s - begin_s, end_s - self._timed.end_s
        python = whole - sampling - sum(model.values())
        return StepTimes(whole, {**model, "sampling": sampling, "python": python})


class _Rounds:
    """Every round measures the limits and runs all steps, in another order each time, so that what disturbs the machine
    for a while does not fall on some of them only. runs: of each step. limits: one a round."""

    def __init__(self, timer: _StepTimer, steps: Sequence[SchedulerOutput], meter: LimitMeter) -> None:
        self._timer = timer
        self._steps = steps
        self._meter = meter
        self.runs: list[list[StepTimes]] = [[] for _ in steps]
        self.limits: list[MachineLimits] = []

    def run(self, seconds: float, on_progress: Callable[[float], None]) -> None:
        # memory is taken and caches are filled before anything counts
        for step in self._steps:
            self._timer.run(step)
        order = list(range(len(self._steps)))
        rng = random.Random(0)
        start_s = time.perf_counter()
        while len(self.limits) < MIN_ROUNDS or time.perf_counter() - start_s < seconds:
            self.limits.append(self._meter.measure())
            rng.shuffle(order)
            for place in order:
                self.runs[place].append(self._timer.run(self._steps[place]))
            share = (time.perf_counter() - start_s) / seconds
            on_progress(min(share, len(self.limits) / MIN_ROUNDS, 1.0))
