"""Compiles what the stages will launch, before they do, on all cores: a GPU waits for nobody who compiles.

The same code launches its kernels on tensors of the device "meta", which `noria.kernels.offline_compile` compiles
without the GPU and leaves in Triton's cache. What is missed here is compiled when it is launched, and counted then.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.attention_checks import attention_checks, variants
from gpu.attention_speed import dry_run
from gpu.checks import DTYPE_NAMES, Check
from gpu.device import Gpu
from gpu.exactness import dtypes
from gpu.op_checks import op_checks
from gpu.random_models import KV_BLOCK_SIZE, random_weights
from gpu.sampling_checks import sampling_checks
from gpu.sizes import TINY, Sizes
from gpu.step_speed import decode_rows
from noria.kernels.linear import Linear
from noria.kernels.ops import triton_kernels
from noria.kernels.quantised_linear import WEIGHT_DTYPES, QuantisedLinear
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig
from noria.runtime.input_batch import InputBatch
from noria.runtime.kv_cache import KVCache
from noria.runtime.triton_sampling import TritonSampler
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SamplingInput, ScheduledSequence

META = torch.device("meta")
# of the checks of one dtype, which have some 60 kernels
_NUM_PARTS = 6


@dataclass(frozen=True)
class Task:
    name: str
    launch: Callable[[], None]


@dataclass(frozen=True)
class Compiled:
    """Of one task. kernels: names. error: what it raised."""

    name: str
    seconds: float
    kernels: tuple[str, ...]
    error: str = ""


def tasks(sizes: Sizes, gpu: Gpu, is_quick: bool, stages: Sequence[str]) -> list[Task]:
    found: list[Task] = []
    if "step" in stages or "engine" in stages:
        found += _model_tasks(sizes, is_quick)
    if "exactness" in stages:
        found += _exactness_tasks(gpu, is_quick)
    if "attention" in stages:
        found += _attention_tasks(sizes)
    return found


def _model_tasks(sizes: Sizes, is_quick: bool) -> Iterator[Task]:
    for model, config in sizes.models.items():
        kinds = [("none", False)] if is_quick else [("none", False), ("int8", False), ("fp8", False), ("none", True)]
        for quantization, is_deterministic in kinds:
            batches = list(sizes.step_batches)
            if model == "1B" and (quantization, is_deterministic) == ("none", False):
                # one of each power of two, which is what a kernel is compiled for
                batches = sorted({*batches, 17, 33, 65, 129})
            launch = partial(_launch_model, config, torch.bfloat16, quantization, is_deterministic, batches)
            yield Task(f"{model} {quantization} {is_deterministic}", launch)


def _exactness_tasks(gpu: Gpu, is_quick: bool) -> Iterator[Task]:
    yield Task("sampling", partial(_launch_all, sampling_checks(gpu, META)))
    for config, dtype in ((TINY, torch.float32), (TINY, torch.bfloat16)):
        for is_deterministic in (False, True):
            launch = partial(_launch_model, config, dtype, "none", is_deterministic, [1, 8])
            yield Task(f"tiny {dtype} {is_deterministic}", launch)
    for dtype in dtypes(gpu, is_quick):
        for variant in variants(dtype, is_toy=False):
            yield Task(variant.name, partial(_launch_all, attention_checks(variant, gpu, META)))
        for part in range(_NUM_PARTS):

            def launch_part(dtype: torch.dtype = dtype, part: int = part) -> None:
                checks = list(op_checks(dtype, gpu, META))
                # neighbours have kernels in common
                size = -(-len(checks) // _NUM_PARTS)
                _launch_all(checks[part * size : (part + 1) * size])

            yield Task(f"ops {DTYPE_NAMES[dtype]} {part}", launch_part)


def _attention_tasks(sizes: Sizes) -> Iterator[Task]:
    for heads in sizes.heads:
        yield Task(f"attention {heads.name}", partial(dry_run, heads, torch.bfloat16, None, sizes))
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        yield Task(f"attention {kv_dtype}", partial(dry_run, sizes.heads[0], torch.bfloat16, kv_dtype, sizes))


def _launch_all(checks: Iterable[Check]) -> None:
    for check in checks:
        check.launch()


def _launch_model(
    config: ModelConfig, dtype: torch.dtype, quantization: str, is_deterministic: bool, batches: Sequence[int]
) -> None:
    """A prompt, a decode of each number of rows, and both together, with sampling."""
    kernels = triton_kernels(dtype, "none", is_deterministic)
    if quantization != "none":
        kernels = replace(kernels, pack_linear=partial(_absent_linear, quantization))
    # one layer has all that the others have
    config = replace(config, num_layers=1)
    decoder = Decoder(config, random_weights(config, dtype, META, 0.02), kernels)
    cache = KVCache(config, 4096, KV_BLOCK_SIZE, dtype, META)
    sampler = TritonSampler()
    prompt = ScheduledSequence(-1, [5] * 24, 0, [0, 1], SamplingInput(SamplingParams(temperature=1.0), 0, 24))
    steps: list[tuple[ScheduledSequence, ...]] = [(prompt,)]
    steps += [decode_rows(config.vocab_size, batch, 8) for batch in batches]
    steps.append((prompt, *steps[-1]))
    for rows in steps:
        batch = InputBatch.build(rows, KV_BLOCK_SIZE, cache.num_blocks)
        logits = decoder.forward(batch.decoder_input(META), cache.layers)
        sampler.enqueue(logits, batch.sampling_inputs)


def _absent_linear(quantization: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    numbers = torch.empty(weight.shape, dtype=WEIGHT_DTYPES[quantization], device=META)
    return QuantisedLinear(numbers, torch.empty(len(weight), dtype=torch.float32, device=META), bias, False)


def precompile(
    found: Sequence[Task], capability: int, seconds: float, num_processes: int | None = None
) -> list[Compiled]:
    """In a process that has not touched the GPU. What is not done after `seconds` is left."""
    deadline = time.time() + seconds
    num_processes = num_processes or len(os.sched_getaffinity(0))
    done: list[Compiled] = []
    context: Any = multiprocessing.get_context("fork")
    with context.Pool(min(num_processes, len(found)), _start_worker, (found, capability)) as pool:
        results = pool.imap_unordered(_compile, range(len(found)))
        for _ in found:
            try:
                done.append(results.next(max(0.1, deadline - time.time())))
            except multiprocessing.TimeoutError:
                break
        pool.terminate()
    return done


# of a worker: set once, before its first task
_work: tuple[Sequence[Task], int] | None = None


def _start_worker(found: Sequence[Task], capability: int) -> None:
    global _work
    _work = found, capability
    torch.set_num_threads(1)


def _compile(index: int) -> Compiled:
    # it takes Triton's parts that only a machine with its compiler has
    from noria.kernels.offline_compile import recording

    assert _work is not None
    task, started, error = _work[0][index], time.perf_counter(), ""
    with recording(_work[1]) as kernels:
        try:
            task.launch()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    names = tuple(kernel.name for kernel in kernels)
    return Compiled(task.name, time.perf_counter() - started, names, error)
