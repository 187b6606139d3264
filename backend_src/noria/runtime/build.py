"""Builds the ModelRunner that an EngineConfig asks for: device, dtype, threads, weights, and a cache that fits.

Everything that depends on the machine or the model's files, and can be wrong, is found out here as a ConfigError.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kernels.ops import torch_kernels, triton_kernels
from noria.kernels.quantised_linear import QuantisationErrors
from noria.models.cpu_decoder import CpuDecoder
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig, load_model_config
from noria.models.safetensors_loader import load_weights
from noria.runtime.dtypes import DTYPES, kv_dtype
from noria.runtime.kernel_choice import choose_kernels, cpu_format
from noria.runtime.kv_cache import GIB, KVCache, bytes_per_block
from noria.runtime.model_runner import ModelRunner, Sampler
from noria.runtime.sampling import sample
from noria.runtime.swap import HostKVCache, apply_block_copies, apply_staged_copies
from noria.runtime.triton_sampling import TritonSampler

log = logging.getLogger(__name__)


def build_runner(engine_config: EngineConfig, model_dir: Path) -> ModelRunner:
    """model_dir: what `resolve_model` made of engine_config.model. Not warmed up yet.

    Sets torch's number of compute threads for the whole process, to 1 beside the compiled kernels. Raises ConfigError.
    """
    device = _pick_device(engine_config.device)
    dtype = DTYPES[engine_config.dtype]
    num_threads = engine_config.num_threads or len(os.sched_getaffinity(0))
    model_config = load_model_config(model_dir)
    kernels = choose_kernels(engine_config, model_config, device)
    # beside the compiled kernels' own threads torch's would wait for work in a loop, on the same cores
    torch.set_num_threads(1 if kernels == "cpu" else num_threads)
    number = kv_dtype(engine_config)
    num_blocks = _num_blocks(engine_config, model_config, number)
    num_host_blocks = _num_host_blocks(engine_config, model_config, number)
    weights = load_weights(model_dir, model_config, dtype, device)
    try:
        decoder = _build_decoder(kernels, engine_config, model_config, weights, num_threads)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"model: {device} does not have the memory for the weights in {dtype}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    cache = KVCache(model_config, num_blocks, engine_config.block_size, number, device)
    return ModelRunner(
        decoder,
        cache,
        _build_sampler(kernels, decoder),
        HostKVCache(cache, num_host_blocks) if num_host_blocks else None,
        # recorded when it is warmed up
        has_cuda_graphs=kernels == "triton" and device.type == "cuda" and engine_config.cuda_graphs,
        apply_copies=apply_staged_copies if kernels == "triton" else apply_block_copies,
    )


def _build_sampler(kernels: str, decoder: Decoder | CpuDecoder) -> Sampler:
    if kernels == "triton":
        return TritonSampler()
    return partial(sample, find_largest=decoder.largest) if isinstance(decoder, CpuDecoder) else sample


def _build_decoder(
    kernels: str, engine_config: EngineConfig, model_config: ModelConfig, weights: dict[str, Tensor], num_threads: int
) -> Decoder | CpuDecoder:
    """kernels: of FAMILIES. Logs once which they are, and in which formats they compute."""
    if kernels == "cpu":
        cpu = cpu_format(engine_config)
        compiled = CpuDecoder(model_config, weights, cpu, num_threads)
        log.info(
            "kernels: the compiled CPU kernels for %s; weights %s, of the head %s; KV %s",
            compiled.instruction_set,
            cpu.weights,
            cpu.head,
            cpu.kv_dtype,
        )
        return compiled
    if kernels == "torch":
        log.info("kernels: torch's operators")
        return Decoder(model_config, weights, torch_kernels())
    quantization, is_deterministic = engine_config.weight_quantization, engine_config.deterministic
    log.info(
        "kernels: the Triton kernels; weights %s; KV %s%s",
        engine_config.dtype if quantization == "none" else quantization,
        engine_config.kv_dtype_name,
        "; deterministic" if is_deterministic else "",
    )
    errors = QuantisationErrors(quantization)
    kernel_set = triton_kernels(DTYPES[engine_config.dtype], quantization, is_deterministic, errors)
    decoder = Decoder(model_config, weights, kernel_set)
    if quantization != "none":
        log.info("kernels: %s", errors)
    return decoder


def _pick_device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but torch finds no CUDA device here: use cpu, or auto")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _num_blocks(engine_config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    if engine_config.num_kv_blocks is not None:
        return engine_config.num_kv_blocks
    size = bytes_per_block(model_config, engine_config.block_size, dtype)
    # one more block than the pool has, see KVCache
    num_blocks = int(engine_config.kv_cache_gib * GIB) // size - 1
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_gib must be at least {2 * size / GIB:.4f} for one block of {engine_config.block_size} tokens of "
            f"this model, not {engine_config.kv_cache_gib}"
        )
    return num_blocks


def _num_host_blocks(engine_config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    # a closed batch never preempts
    if engine_config.preemption != "swap" or engine_config.batching_mode != "inflight":
        return 0
    if engine_config.num_host_blocks is not None:
        if engine_config.num_host_blocks < 1:
            raise ConfigError("num_host_blocks must be at least 1 where preemption is swap, not 0")
        return engine_config.num_host_blocks
    size = bytes_per_block(model_config, engine_config.block_size, dtype)
    num_blocks = int(engine_config.swap_space_gib * GIB) // size
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space_gib ({engine_config.swap_space_gib}) must hold at least one block of "
            f"{engine_config.block_size} tokens of this model, {size} bytes, where preemption is swap"
        )
    return num_blocks
