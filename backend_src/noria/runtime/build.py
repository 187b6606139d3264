"""Builds the ModelRunner that an EngineConfig asks for: device, dtype, threads, weights, and a cache that fits.

Everything that depends on the machine or the model's files, and can be wrong, is found out here as a ConfigError.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.kernels.cpu_library import KV_FORMATS, load_library
from noria.kernels.ops import torch_kernels
from noria.models.cpu_decoder import CpuDecoder, CpuFormat
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig, load_model_config
from noria.models.safetensors_loader import load_weights
from noria.runtime.kv_cache import GIB, KVCache, bytes_per_block
from noria.runtime.model_runner import ModelRunner
from noria.runtime.sampling import sample
from noria.runtime.swap import HostKVCache

log = logging.getLogger(__name__)

# bfloat16 and float16 work on a CPU too and halve the memory, but are slower there than float32 without AMX or AVX-512
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def build_runner(engine_config: EngineConfig, model_dir: Path) -> ModelRunner:
    """model_dir: what `resolve_model` made of engine_config.model. Not warmed up yet.

    Sets torch's number of compute threads for the whole process, to 1 beside the compiled kernels. Raises ConfigError.
    """
    device = _pick_device(engine_config.device)
    dtype = _DTYPES[engine_config.dtype]
    num_threads = engine_config.num_threads or len(os.sched_getaffinity(0))
    model_config = load_model_config(model_dir)
    cpu_format = _pick_cpu_format(engine_config, model_config, device)
    # beside the compiled kernels' own threads torch's would wait for work in a loop, on the same cores
    torch.set_num_threads(1 if cpu_format else num_threads)
    number = kv_dtype(engine_config)
    num_blocks = _num_blocks(engine_config, model_config, number)
    num_host_blocks = _num_host_blocks(engine_config, model_config, number)
    weights = load_weights(model_dir, model_config, dtype, device)
    try:
        decoder = (
            CpuDecoder(model_config, weights, cpu_format, num_threads)
            if cpu_format
            else Decoder(model_config, weights, torch_kernels())
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"model: {device} does not have the memory for the weights in {dtype}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    cache = KVCache(model_config, num_blocks, engine_config.block_size, number, device)
    return ModelRunner(decoder, cache, sample, HostKVCache(cache, num_host_blocks) if num_host_blocks else None)


def _pick_cpu_format(engine_config: EngineConfig, model_config: ModelConfig, device: torch.device) -> CpuFormat | None:
    """What the compiled CPU kernels are to compute; None for torch's operators. Logged once.

    Raises ConfigError where the configuration asks for what only the compiled kernels do, and they cannot run.
    """
    cpu_format = CpuFormat(
        weights="float32" if engine_config.weight_quantization == "none" else engine_config.weight_quantization,
        kv_dtype=engine_config.kv_dtype_name,
        block_size=engine_config.block_size,
    )
    reason = _why_not_cpu_kernels(engine_config, model_config, device, cpu_format)
    if not reason:
        log.info(
            "kernels: the compiled CPU kernels; weights %s, of the head %s; KV %s",
            cpu_format.weights,
            cpu_format.head,
            cpu_format.kv_dtype,
        )
        return cpu_format
    if wanted := engine_config.cpu_kernels_setting:
        raise ConfigError(f"{wanted} needs the compiled CPU kernels, but {reason}")
    if device.type == "cpu" and engine_config.kernels == "auto":
        log.warning("kernels: torch's operators, several times slower than the compiled CPU kernels: %s", reason)
    else:
        log.info("kernels: torch's operators")
    return None


def _why_not_cpu_kernels(
    engine_config: EngineConfig, model_config: ModelConfig, device: torch.device, cpu_format: CpuFormat
) -> str:
    """Empty where they can run."""
    if reason := engine_config.torch_kernels_setting:
        return reason
    if device.type != "cpu":
        return f"device is {device.type}"
    if cpu_format.kv_dtype not in KV_FORMATS:
        return f"kv_cache_dtype must be one of {', '.join(KV_FORMATS)}, not {cpu_format.kv_dtype}"
    try:
        cpu_format.check(model_config)
        load_library()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def kv_dtype(engine_config: EngineConfig) -> torch.dtype:
    """Of the numbers in the KV cache."""
    return _DTYPES[engine_config.kv_dtype_name]


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
