"""A decode step of a whole model: as a share of the time in which its weights can be read, and the host's part in it.

Three times of a step, with sampling:

- ahead: of many, each launched before the one before it is over, with the token that that one draws, as the engine does
  in flight: the host's work is hidden behind the GPU's, or the GPU's behind the host's
- waited for: by the host's clock around `ModelRunner.execute`, the host's work in the GPU's way
- GPU: ahead, and all launched while the GPU waits: the host's work is out of it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from gpu.ceilings import Ceilings, measure_ceilings
from gpu.device import Gpu
from gpu.model_checks import capture_for
from gpu.random_models import KV_BLOCK_SIZE, bytes_read, random_decoder, random_runner
from gpu.rows import Row
from gpu.sizes import Sizes
from gpu.stages import Unit
from noria.kernels.quantised_linear import QuantisationErrors
from noria.models.decoder import Decoder
from noria.runtime.cuda_graphs import DecodeGraphs
from noria.runtime.input_batch import InputBatch
from noria.runtime.model_runner import ModelRunner, SubmittedStep
from noria.sampling_params import SamplingParams
from noria.scheduler_output import PLACEHOLDER, SamplingInput, ScheduledSequence, SchedulerOutput

STAGE = "step"
FLOOR_TARGETS = {("8B", 1): 0.6, ("1B", 1): 0.4}
GRAPHS_TARGET = 3.0
# steps that the host launches ahead; an eager one may be 300 launches, and the queue holds some 1,000
_AHEAD = {"graph": 8, "eager": 2}


class StepSpeed:
    def __init__(self, sizes: Sizes, gpu: Gpu, is_quick: bool) -> None:
        self.sizes, self.gpu, self._is_quick = sizes, gpu, is_quick
        # the interpreter computes products in bfloat16 wrongly
        self.dtype = torch.float32 if gpu.is_interpreted else torch.bfloat16
        self._ceilings: Ceilings | None = None

    def units(self) -> Iterator[Unit]:
        kinds = [("none", False), ("int8", False), ("fp8", False), ("none", True)]
        if self._is_quick or self.gpu.is_interpreted:
            kinds = kinds[: 1 + self.gpu.is_interpreted]
        for quantization, is_deterministic in kinds:
            for model in self.sizes.models:
                name = f"{model}{_kind(quantization, is_deterministic)}"
                seconds = 8.0 if model == "8B" else 5.0
                yield Unit(name, self._measure(model, quantization, is_deterministic), seconds)

    def _measure(self, model: str, quantization: str, is_deterministic: bool) -> Callable[[], Sequence[Row]]:
        def run() -> Sequence[Row]:
            if self._ceilings is None:
                self._ceilings = measure_ceilings(self.sizes, self.gpu)
            errors = QuantisationErrors(quantization)
            decoder = random_decoder(
                self.sizes.models[model],
                self.dtype,
                self.gpu.device,
                quantization=quantization,
                is_deterministic=is_deterministic,
                errors=errors,
            )
            floor_ms = 1e3 * bytes_read(decoder.config, 2 if quantization == "none" else 1)
            floor_ms /= self._ceilings.copy_bytes_per_s
            rows = self._rows(f"{model}{_kind(quantization, is_deterministic)}", decoder, floor_ms)
            if quantization != "none":
                error = 100 * statistics.mean(errors.of_layers)
                note = f"of random weights; {errors}"
                rows.append(Row(STAGE, f"weights of {model} in {quantization}, error", error, "%", note=note))
            del decoder
            self.gpu.release()
            return rows

        return run

    def _rows(self, name: str, decoder: Decoder, floor_ms: float) -> list[Row]:
        batches, context = self.sizes.step_batches, self.sizes.step_context
        num_blocks = max(batches) * (context // KV_BLOCK_SIZE + 1)
        runner = random_runner(decoder, num_blocks, self.gpu)
        rows = []
        eager = {batch: self._times(runner, batch, "eager") for batch in batches}
        runner.graphs = DecodeGraphs(decoder, runner.cache, batches, capture_for(self.gpu))
        graph = {batch: self._times(runner, batch, "graph") for batch in batches}
        for batch in batches:
            title = f"decode step {name}, batch {batch}"
            times = graph[batch]
            target = FLOOR_TARGETS.get((name, batch))
            note = (
                f"floor {floor_ms:.2f} ms; ahead {times['ahead_ms']:.2f}, waited for {times['waited_ms']:.2f}, "
                f"GPU {times['gpu_ms']:.2f}, host {times['host_ms']:.2f} ms"
            )
            details = {"floor_ms": floor_ms, "graph": times, "eager": eager[batch]}
            share = floor_ms / times["ahead_ms"]
            rows.append(Row(STAGE, title, share, "of floor", target, note=note, details=details))
            rows.append(Row(STAGE, f"{title}, waited for", floor_ms / times["waited_ms"], "of floor"))
            ratio = eager[batch]["ahead_ms"] / times["ahead_ms"]
            note = (
                f"eager: ahead {eager[batch]['ahead_ms']:.2f}, waited for {eager[batch]['waited_ms']:.2f}, "
                f"GPU {eager[batch]['gpu_ms']:.2f} ms"
            )
            target = GRAPHS_TARGET if (name, batch) == ("1B", 1) else None
            rows.append(Row(STAGE, f"{title}, graphs", ratio, "x eager", target, note=note))
        return rows

    def _times(self, runner: ModelRunner, batch: int, kind: str) -> dict[str, float]:
        context = self.sizes.step_context
        scheduled = SchedulerOutput(step=0, rows=decode_rows(runner.decoder.config.vocab_size, batch, context))
        # as the engine runs ahead: each row's token is what the step before draws, which the host does not know
        ahead = SchedulerOutput(step=0, rows=tuple(replace(row, token_ids=[PLACEHOLDER]) for row in scheduled.rows))

        def launch() -> SubmittedStep:
            return runner.submit(ahead)

        if kind == "graph":
            batch_of_rows = InputBatch.build(scheduled.rows, KV_BLOCK_SIZE, runner.cache.num_blocks)
            assert runner.graphs is not None, "no graphs were recorded"
            assert runner.graphs.forward(batch_of_rows) is not None, "no graph takes the step"
        num_steps = self.sizes.step_repeats
        waited = []
        for _ in range(1 if self.gpu.is_interpreted else 3):
            runner.execute(scheduled)
        for _ in range(num_steps):
            self.gpu.synchronize()
            started = time.perf_counter()
            runner.execute(scheduled)
            waited.append(time.perf_counter() - started)
        self.gpu.synchronize()
        # the host's own time: of few enough launches that the queue never fills
        host = []
        for _ in range(max(1, num_steps // 4)):
            started = time.perf_counter()
            launch()
            host.append(time.perf_counter() - started)
            self.gpu.synchronize()
        # the first time, page-locked memory is made for all that is under way
        for _ in range(1 if self.gpu.is_interpreted else 2):
            started = time.perf_counter()
            for _ in range(num_steps):
                pending = launch()
            pending.result()
            self.gpu.synchronize()
            ahead_s = (time.perf_counter() - started) / num_steps
        return {
            "waited_ms": 1e3 * statistics.median(waited),
            "host_ms": 1e3 * statistics.median(host),
            "ahead_ms": 1e3 * ahead_s,
            "gpu_ms": self.gpu.ahead_ms(launch, _AHEAD[kind]),
        }


def _kind(quantization: str, is_deterministic: bool) -> str:
    weights = "" if quantization == "none" else f" {quantization}"
    return weights + (" deterministic" if is_deterministic else "")


def decode_rows(vocab_size: int, batch: int, context: int) -> tuple[ScheduledSequence, ...]:
    """One token each, at position `context`, on blocks of their own."""
    params, num_blocks = SamplingParams(temperature=0.0), context // KV_BLOCK_SIZE + 1
    return tuple(
        ScheduledSequence(
            request_id=row,
            token_ids=[(7919 * row + 11) % vocab_size],
            num_computed_tokens=context,
            # far from each other
            block_table=[row + batch * block for block in range(num_blocks)],
            sampling=SamplingInput(params, seed=0, position=context + 1),
        )
        for row in range(batch)
    )
