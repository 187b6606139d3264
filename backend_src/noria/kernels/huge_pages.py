"""Memory in pages of 2 MiB, where the system gives them: what a step reads is far more than what the processor keeps
translations of in pages of 4 KiB. Knows nothing of what lies in the memory."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE_BYTES = 2**21


def advise_huge_pages(memory: Tensor) -> None:
    """Asks for them, for a tensor on the CPU that was not written to yet; where there are none, nothing changes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-memory.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    size = (memory.data_ptr() + memory.nbytes - begin) // PAGE_BYTES * PAGE_BYTES
    if memory.device.type != "cpu" or advice is None or size <= 0:
        return
    # the system's own default, sometimes, is to give none unless asked
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(advice))


class Arena:
    """Hands out pieces of larger pieces of memory. It is given back when no tensor of a larger piece is left."""

    def __init__(self, chunk_bytes: int, alignment: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._alignment = alignment
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], not initialised, at a multiple of the alignment."""
        num_bytes = -(-count * dtype.itemsize // self._alignment) * self._alignment
        if num_bytes > len(self._free):
            memory = torch.empty(max(num_bytes, self._chunk_bytes) + PAGE_BYTES, dtype=torch.uint8)
            advise_huge_pages(memory)
            self._free = memory[-memory.data_ptr() % PAGE_BYTES :]
        piece, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return piece[: count * dtype.itemsize].view(dtype)
