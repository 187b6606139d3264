"""HostKVCache: blocks of the KV cache that were put aside in the host's memory, and the copies there and back.

Which block goes where, and whose it is, the scheduler says. Not made unless sequences are swapped out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from noria.errors import ConfigError
from noria.runtime.kv_cache import GIB, KVCache
from noria.scheduler_output import BlockCopy


class HostKVCache:
    """memory: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], so that a block is one piece.

    Page-locked where the cache is on a GPU, whose copy engine then reads and writes it without the CPU.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        """Raises ConfigError where the memory is not there."""
        self.num_blocks = num_blocks
        block = cache.memory[:, :, 0]
        try:
            # written to, as KVCache's memory is, so that it is there from now on
            self.memory = torch.empty(
                (num_blocks, *block.shape), dtype=block.dtype, pin_memory=cache.memory.is_cuda
            ).zero_()
        except RuntimeError as error:
            raise ConfigError(
                f"a host pool of {num_blocks} blocks takes {num_blocks * block.nbytes / GIB:.2f} GiB, which this "
                f"machine does not have: lower swap_space_gib or num_host_blocks ({error})"
            ) from None


def apply_block_copies(cache: KVCache, host: HostKVCache, copies: Sequence[BlockCopy]) -> None:
    """Carries out the copies one after the other, each for all layers.

    On a GPU they are only queued: what the same stream computes later sees them done, and the CPU does not wait.
    """
    for copy in copies:
        if copy.is_swap_in:
            cache.memory[:, :, copy.target].copy_(host.memory[copy.source], non_blocking=True)
        else:
            host.memory[copy.target].copy_(cache.memory[:, :, copy.source], non_blocking=True)
