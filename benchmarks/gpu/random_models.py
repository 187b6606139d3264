"""Random weights at a model's shapes, made on the device, and what runs them.

Nothing is loaded: the numbers are of a normal distribution, small enough that activations stay finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.device import Gpu
from noria.kernels.ops import triton_kernels
from noria.kernels.quantised_linear import QuantisationErrors
from noria.models.decoder import Decoder
from noria.models.model_config import ModelConfig
from noria.models.weights import EMBEDDING, expected_weights
from noria.runtime.kv_cache import KVCache
from noria.runtime.model_runner import ModelRunner
from noria.runtime.triton_sampling import TritonSampler

KV_BLOCK_SIZE = 16
SEED = 17


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, std: float) -> dict[str, Tensor]:
    """All of `expected_weights`, the same for the same arguments; norms near 1."""
    generator = None
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(SEED)
    weights = {}
    for name, shape in expected_weights(config).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        if "norm" in name:
            weight.normal_(1.0, 0.1, generator=generator)
        else:
            weight.normal_(0.0, std, generator=generator)
        weights[name] = weight
    return weights


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str = "none",
    is_deterministic: bool = False,
    std: float = 0.02,
    errors: QuantisationErrors | None = None,
) -> Decoder:
    kernels = triton_kernels(dtype, quantization, is_deterministic, errors)
    return Decoder(config, random_weights(config, dtype, device, std), kernels)


def random_runner(decoder: Decoder, num_blocks: int, gpu: Gpu, has_cuda_graphs: bool = False) -> ModelRunner:
    """What is in the cache is random too. has_cuda_graphs: see ModelRunner."""
    cache = KVCache(decoder.config, num_blocks, KV_BLOCK_SIZE, decoder.dtype, gpu.device)
    # a layer at a time: one call takes int32 indices where it can
    for keys_and_values in cache.memory:
        keys_and_values.normal_()
    return ModelRunner(decoder, cache, TritonSampler(), has_cuda_graphs=has_cuda_graphs)


def bytes_read(config: ModelConfig, bytes_per_weight: float) -> int:
    """Of a decode step's weights: all, but of the embedding, where it is not the head too, only the rows it takes."""
    total = 0.0
    for name, shape in expected_weights(config).items():
        numbers = torch.Size(shape).numel()
        if name == EMBEDDING and not config.tie_word_embeddings:
            continue
        is_linear = len(shape) == 2
        total += numbers * (bytes_per_weight if is_linear else 2)
    return int(total)
