"""EngineConfig: every choice of the engine, as data, checked once and never written back.

Knows nothing of where the values come from (see `config_sources`), nor of models on disk or devices: what depends on
those is checked where they are opened.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from noria.errors import ConfigError
from noria.kernel_settings import FAMILIES, KernelSettings
from noria.presets import PRESETS

EMBEDDED_MODEL = "embedded"

_CHOICES = {
    "batching_mode": ("inflight", "static", "dynamic"),
    "dtype": ("float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", *FAMILIES),
    "weight_quantization": ("none", "int8", "int4", "fp8"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
    "admission": ("max_utilization", "guaranteed_no_evict"),
    "insertion": ("immediate", "waiting_served_ratio"),
    "prefill_batching": ("mixed", "separate"),
    "prefill_order": ("fcfs", "equal_progress"),
    "preemption": ("recompute", "swap"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 256),
    "num_kv_blocks": (1, 2**31),
    "kv_cache_gib": (0.001, 1024),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "max_model_len": (2, 2**24),
    "max_prompt_len": (1, 2**24),
    "max_output_len": (1, 2**24),
    "max_queue_size": (1, 2**20),
    "max_queue_tokens": (1, 2**31),
    "num_threads": (1, 1024),
    "max_prefill_tokens": (1, 2**20),
    "max_batch_total_tokens": (1, 2**31),
    "admission_headroom": (0.0, 0.9),
    "waiting_served_ratio": (0.0, 1000.0),
    "max_waiting_tokens": (0, 2**20),
    "num_host_blocks": (0, 2**31),
    "swap_space_gib": (0.0, 1024),
    "max_preemptions": (0, 2**20),
    "priority_levels": (1, 64),
    "default_priority_level": (1, 64),
    "priority_ageing_s": (0.001, 1e9),
    "stream_interval": (1, 2**20),
    "max_unsent_bytes": (1, 2**31),
    "slow_reader_timeout_s": (0.0, 1e9),
    "default_timeout_s": (0.001, 1e9),
}


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """Limits of one priority level, beside those of the whole engine. None is no limit of its own.

    max_queue_size, max_queue_tokens: requests of the level, and their prompt tokens, that may wait.
    max_prompt_len, max_output_len: tokens of a request of the level.
    default_timeout_s: the deadline of a request that brings none, in seconds after it came.
    """

    max_queue_size: int | None = None
    max_queue_tokens: int | None = None
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    default_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine is made of.

    model: `embedded`, a Hugging Face directory, or a .gguf file.
    batching_mode: inflight re-decides the batch at every step; static and dynamic run a closed batch to its end, and
        differ only in how Triton is told to form it.
    kernels: cpu are the compiled ones, which know float32 on an x86-64 CPU; triton run on an NVIDIA GPU; torch are
        torch's operators; auto takes the first of these that can do what the others ask for.
    weight_quantization: of linear layers. int8, fp8 (triton kernels): one scale an output. int8 (cpu kernels): a scale
        for 32 inputs of an output, which keeps a block of GGUF's Q8_0 as it was if it has a 127, as llama.cpp writes
        them. int4 (cpu): a scale and a minimum for as many, which does the same for Q4_1 where a block uses all its
        range, as the embedded model's do; the head is int8. Both of the cpu kernels' round activations to 8 bits.
    kv_cache_dtype: auto is dtype; with cpu kernels also bfloat16 or int8, with triton kernels int8 or fp8, these two
        with a scale for each token and head.
    deterministic: a request's logits have the same bits whatever the batch, chunks, preemptions and prefix cache. The
        cpu kernels are so always, the triton kernels at a price, torch's operators never.
    cuda_graphs: with triton kernels, replay decodes as CUDA graphs; they take memory, which the log names.
    run_ahead: with triton kernels and in flight, decide and launch a step while the one before it is computed; its
        tokens stay on the GPU. False waits for each step, as closed batches and other kernels do.
    block_size: tokens per block of the KV cache.
    num_kv_blocks: blocks of the pool; None takes as many as fit into kv_cache_gib (2**30 bytes).
    max_num_seqs: sequences in one step, the slots.
    max_num_batched_tokens: tokens computed in one step (in-flight mode); longer prompts are computed in chunks.
    max_model_len, max_prompt_len, max_output_len: tokens of a whole sequence, its prompt, its output; None is what the
        model was made for.
    preset: the policies of another system, see `presets`; its values have been put in place when this is made.
    max_prefill_tokens: the part of max_num_batched_tokens that prompts may take (TGI's max_batch_prefill_tokens).
    chunked_prefill: compute a prompt over several steps where it does not fit into one (Sarathi-Serve, OSDI'24).
    prefill_batching: mixed computes prompts beside decodes; in separate steps for prompts and for decodes take turns.
    prefill_order: fcfs, or equal_progress, where all prompts under way share the budget.
    admission: max_utilization joins while the known tokens fit and preempts when blocks run out; guaranteed_no_evict
        reserves prompt and max_tokens, and never preempts.
    admission_headroom: share of the blocks that must stay free when a sequence joins others.
    insertion: immediate, or waiting_served_ratio: TGI's rule, by which waiting sequences join when there are at least
        waiting_served_ratio as many as run, or after max_waiting_tokens steps without any joining.
    max_batch_total_tokens: tokens that all sequences in the batch may come to, as far as they are reserved.
    preemption: recompute drops what the victim has computed; swap copies it to a host pool of num_host_blocks, or as
        many as fit into swap_space_gib (2**30 bytes), and recomputes when that is full.
    max_preemptions: after so many, a request joins only with all that it may need reserved, and stays.
    prefix_caching: blocks of equal beginnings are computed once and shared.
    priority_levels, default_priority_level: as in Triton's dynamic_batching: 1 is served first.
    priority_ageing_s: a request counts as one level higher for each so many seconds since it came; None is never.
    priority_classes: PriorityClass by level.
    fair_share: between the `user`s of one level, by the tokens each was given (VTC, OSDI'24).
    max_queue_size, max_queue_tokens: requests, and their prompt tokens, that may wait; one more is UNAVAILABLE.
    default_timeout_s: the deadline of a request that brings none, in seconds after it came.
    stream_interval: new tokens in a streamed response; the first is sent at once, and what is left with the end.
    max_unsent_bytes: of one request's responses that Triton has not taken, before the request is paused;
        slow_reader_timeout_s: how long it may stay so before it is ended.
    trace_path: a file to record every step in, see `engine.trace`; None records nothing.
    num_threads: compute threads on a CPU; None is one per core that this process may use.
    cache_dir: where converted models are kept; None is $XDG_CACHE_HOME/noria or ~/.cache/noria.
    """

    model: str = EMBEDDED_MODEL
    batching_mode: str = "inflight"
    dtype: str = "float32"
    device: str = "auto"
    kernels: str = "auto"
    weight_quantization: str = "none"
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    cuda_graphs: bool = True
    run_ahead: bool = True
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_gib: float = 1.0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    max_output_len: int | None = None
    max_queue_size: int = 1024
    max_queue_tokens: int | None = None
    num_threads: int | None = None
    cache_dir: str | None = None
    preset: str | None = None
    max_prefill_tokens: int | None = None
    chunked_prefill: bool = True
    prefill_batching: str = "mixed"
    prefill_order: str = "fcfs"
    admission: str = "max_utilization"
    admission_headroom: float = 0.01
    insertion: str = "immediate"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_total_tokens: int | None = None
    preemption: str = "recompute"
    num_host_blocks: int | None = None
    swap_space_gib: float = 1.0
    max_preemptions: int = 4
    prefix_caching: bool = True
    priority_levels: int = 3
    default_priority_level: int = 2
    priority_ageing_s: float | None = 60.0
    priority_classes: Mapping[int, PriorityClass] = field(default_factory=dict)
    fair_share: bool = False
    default_timeout_s: float | None = None
    stream_interval: int = 1
    max_unsent_bytes: int = 2**20
    slow_reader_timeout_s: float = 30.0
    trace_path: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        _check_ranges(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step decodes one token for each"
            )
        self.kernel_settings.check()
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, or null, not {self.preset!r}")
        if self.default_priority_level > self.priority_levels:
            raise ConfigError(
                f"default_priority_level must be from 1 to priority_levels ({self.priority_levels}), "
                f"not {self.default_priority_level}"
            )
        for level in self.priority_classes:
            if not 1 <= level <= self.priority_levels:
                raise ConfigError(
                    f"priority_classes: levels are 1 to priority_levels ({self.priority_levels}), not {level}"
                )
        if not self.model:
            raise ConfigError(f"model must be {EMBEDDED_MODEL!r}, a Hugging Face directory or a .gguf file, not empty")

    @property
    def kv_dtype_name(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def kernel_settings(self) -> KernelSettings:
        return KernelSettings(
            self.kernels, self.dtype, self.weight_quantization, self.kv_dtype_name, self.deterministic
        )


def _check_ranges(values: EngineConfig | PriorityClass) -> None:
    for name in (entry.name for entry in dataclasses.fields(values) if entry.name in _RANGES):
        low, high = _RANGES[name]
        value = getattr(values, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} must be from {low} to {high}, not {value}")


def default_cache_dir() -> Path:
    """Where converted models and other things that can be made again are kept, unless cache_dir says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "noria"
