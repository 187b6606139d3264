import pytest
import torch

from noria.errors import ConfigError
from noria.models.model_config import ModelConfig
from noria.runtime.kv_cache import KVCache, bytes_per_block
from support.tiny_models import tiny_config

CPU = torch.device("cpu")


def config():
    return ModelConfig.from_hf(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})


def test_has_the_blocks_and_one_that_is_never_read():
    cache = KVCache(config(), num_blocks=5, block_size=3, dtype=torch.float16, device=CPU)
    assert len(cache.layers) == 2
    for k, v in cache.layers:
        assert k.shape == v.shape == (6, 3, 2, 16)
        assert k.is_contiguous()
        assert k.dtype == torch.float16


def test_layers_share_nothing():
    cache = KVCache(config(), num_blocks=2, block_size=1, dtype=torch.float32, device=CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def test_bytes_per_block_is_what_a_block_takes():
    small, large = (KVCache(config(), n, 16, torch.bfloat16, CPU) for n in (3, 4))
    sizes = [sum(tensor.nbytes for layer in cache.layers for tensor in layer) for cache in (small, large)]
    assert sizes[1] - sizes[0] == bytes_per_block(config(), 16, torch.bfloat16) == 2 * 2 * 16 * 2 * 16 * 2


def test_too_large_a_cache_names_the_settings():
    with pytest.raises(ConfigError, match="kv_cache_gib or num_kv_blocks"):
        KVCache(config(), num_blocks=2**44, block_size=16, dtype=torch.float32, device=CPU)
