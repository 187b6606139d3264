"""KVCache: the memory of all layers' keys and values, cut into blocks. Knows nothing of who owns a block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noria.errors import ConfigError
from noria.kernels.huge_pages import advise_huge_pages
from noria.kernels.kv_format import SCALE_BYTES, is_quantised
from noria.models.model_config import ModelConfig

GIB = 2**30


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of `block_size` tokens takes in all layers together."""
    return 2 * config.num_layers * math.prod(_block_shape(config, block_size, dtype)) * dtype.itemsize


def _block_shape(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of one layer's keys, or values. In one byte a number a float32 scale for each token and head is among them."""
    if is_quantised(dtype):
        return (block_size * config.num_kv_heads * (config.head_dim + SCALE_BYTES),)
    return block_size, config.num_kv_heads, config.head_dim


class KVCache:
    """memory: [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim], keys before values; in int8 or fp8
    [num_layers, 2, num_blocks + 1, bytes of a block]. How the numbers lie within a block is the kernels' own affair.

    layers[i]: keys and values of layer i, views of it, each [num_blocks + 1, ...].
    The block after the last takes what has to be written somewhere and is never read: padding rows' keys and values.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ConfigError where the memory is not there."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (config.num_layers, 2, num_blocks + 1, *_block_shape(config, block_size, dtype))
        try:
            # one piece, and written to: a system that promises more memory than it has would fail later otherwise
            self.memory = torch.empty(shape, dtype=dtype, device=device)
            advise_huge_pages(self.memory)
            self.memory.zero_()
        except RuntimeError as error:
            gib = (num_blocks + 1) * bytes_per_block(config, block_size, dtype) / GIB
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks takes {gib:.2f} GiB, which {device} does not have: "
                f"lower kv_cache_gib or num_kv_blocks ({error})"
            ) from None
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple((layer[0], layer[1]) for layer in self.memory)
