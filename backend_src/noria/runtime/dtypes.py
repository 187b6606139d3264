"""The number types of a configuration, by their names in it."""

from __future__ import annotations

import torch

from noria.config import EngineConfig

# bfloat16 and float16 work on a CPU too and halve the memory, but are slower there than float32 without AMX or AVX-512
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def kv_dtype(engine_config: EngineConfig) -> torch.dtype:
    """Of the numbers in the KV cache."""
    return DTYPES[engine_config.kv_dtype_name]
