"""HostKVCache: blocks of the KV cache that were put aside in the host's memory, and the copies there and back.

Which block goes where, and whose it is, the scheduler says. Not made unless sequences are swapped out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from noria.errors import ConfigError
from noria.kernels.block_copies import gather_blocks_triton, scatter_blocks_triton
from noria.kernels.upload import upload
from noria.runtime.kv_cache import GIB, KVCache
from noria.scheduler_output import BlockCopy

# of the GPU's memory, taken while blocks are swapped
_STAGING_BYTES = 2**26


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


# carries out the copies one after the other, each for all layers
ApplyCopies = Callable[[KVCache, HostKVCache, Sequence[BlockCopy]], None]


def apply_block_copies(cache: KVCache, host: HostKVCache, copies: Sequence[BlockCopy]) -> None:
    """Block by block, with torch's copies.

    On a GPU they are only queued: what the same stream computes later sees them done, and the CPU does not wait.
    """
    for copy in copies:
        if copy.is_swap_in:
            cache.memory[:, :, copy.target].copy_(host.memory[copy.source], non_blocking=True)
        else:
            host.memory[copy.target].copy_(cache.memory[:, :, copy.source], non_blocking=True)


def apply_staged_copies(cache: KVCache, host: HostKVCache, copies: Sequence[BlockCopy]) -> None:
    """With the Triton kernels, by way of the GPU: a block, in the cache in as many pieces as it has layers, times two,
    crosses the bus in one.
    """
    at_once = max(1, _STAGING_BYTES // host.memory[0].nbytes)
    for is_swap_in, run in groupby(copies, key=attrgetter("is_swap_in")):
        for part in _parts(list(run), at_once):
            blocks = np.array([copy.target if is_swap_in else copy.source for copy in part], dtype=np.int64)
            (block_ids,) = upload((blocks,), cache.memory.device)
            if is_swap_in:
                staging = cache.memory.new_empty(len(part), *host.memory.shape[1:])
                for piece, copy in zip(staging, part, strict=True):
                    piece.copy_(host.memory[copy.source], non_blocking=True)
                scatter_blocks_triton(cache.memory, staging, block_ids)
            else:
                for piece, copy in zip(gather_blocks_triton(cache.memory, block_ids), part, strict=True):
                    host.memory[copy.target].copy_(piece, non_blocking=True)


def _parts(copies: Sequence[BlockCopy], at_once: int) -> Iterator[Sequence[BlockCopy]]:
    """Of up to `at_once` copies, none of which brings in a block that another of its part does."""
    part: list[BlockCopy] = []
    for copy in copies:
        if len(part) == at_once or (copy.is_swap_in and any(copy.target == other.target for other in part)):
            yield part
            part = []
        part.append(copy)
    yield part
