"""Which family of kernels runs: of those that the settings allow, the first that this machine and this model allow."""

from __future__ import annotations

import importlib.util
import logging

import torch

from noria.config import EngineConfig
from noria.kernel_settings import FAMILIES
from noria.kernels.attention_tiles import check_supported
from noria.kernels.cpu_library import load_library
from noria.kernels.language import CAPABILITIES, FP8_CAPABILITY, IS_INTERPRETED
from noria.models.cpu_decoder import CpuFormat
from noria.models.model_config import ModelConfig
from noria.runtime.dtypes import DTYPES, kv_dtype

log = logging.getLogger(__name__)


def choose_kernels(engine_config: EngineConfig, model_config: ModelConfig, device: torch.device) -> str:
    """One of FAMILIES. Logs a warning where auto has to do with the slowest. Raises ConfigError where none can run."""
    obstacles: dict[str, str] = {}
    for family in FAMILIES:
        reason = engine_config.kernel_settings.obstacle(family) or _machine_obstacle(
            family, engine_config, model_config, device
        )
        if not reason:
            break
        obstacles[family] = reason
    else:
        raise engine_config.kernel_settings.no_kernels(obstacles)
    if family == "torch" and engine_config.kernels == "auto":
        missed = "cpu" if device.type == "cpu" else "triton"
        log.warning(
            "kernels: torch's operators, several times slower than the %s kernels: %s", missed, obstacles[missed]
        )
    return family


def cpu_format(engine_config: EngineConfig) -> CpuFormat:
    """What the compiled CPU kernels are to compute."""
    quantization = engine_config.weight_quantization
    return CpuFormat(
        weights="float32" if quantization == "none" else quantization,
        kv_dtype=engine_config.kv_dtype_name,
        block_size=engine_config.block_size,
    )


def _machine_obstacle(
    family: str, engine_config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> str | None:
    if family == "cpu":
        return _cpu_obstacle(engine_config, model_config, device)
    if family == "triton":
        return _triton_obstacle(engine_config, model_config, device)
    return None


def _cpu_obstacle(engine_config: EngineConfig, model_config: ModelConfig, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"device is {device.type}"
    try:
        cpu_format(engine_config).check(model_config)
        load_library()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _triton_obstacle(engine_config: EngineConfig, model_config: ModelConfig, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (noria's extra `gpu` has it)"
    if device.type == "cuda":
        if reason := _capability_obstacle(engine_config, device):
            return reason
    elif not IS_INTERPRETED:
        found = "is cpu" if engine_config.device == "cpu" else f"has no CUDA for torch {torch.__version__}"
        return f"the device {found}, and they run on an NVIDIA GPU (or, for tests, with TRITON_INTERPRET=1)"
    elif engine_config.kernels == "auto":
        return "on a CPU they are interpreted"
    try:
        check_supported(
            DTYPES[engine_config.dtype],
            kv_dtype(engine_config),
            model_config.head_dim,
            model_config.num_heads // model_config.num_kv_heads,
            engine_config.block_size,
        )
    except ValueError as error:
        return str(error)
    return None


def _capability_obstacle(engine_config: EngineConfig, device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor not in CAPABILITIES:
        known = ", ".join(f"{capability / 10:.1f}" for capability in CAPABILITIES)
        return f"the GPU's compute capability must be one of {known}, not {major}.{minor}"
    numbers = (engine_config.weight_quantization, engine_config.kv_dtype_name)
    if 10 * major + minor < FP8_CAPABILITY and "fp8" in numbers:
        return f"fp8 needs compute capability {FP8_CAPABILITY / 10:.1f} or later, and the GPU has {major}.{minor}"
    return None
