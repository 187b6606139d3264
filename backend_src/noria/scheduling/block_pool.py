"""The blocks of the KV cache as numbers: which are free, which are held. Knows nothing of sequences or tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """A fixed number of equal blocks. Freed blocks are handed out again last freed, last used (FIFO)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._is_held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` block ids, or None and no change when fewer are free."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._is_held[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back. Raises ValueError, and changes nothing, when one of them is not held."""
        if len(set(blocks)) != len(blocks) or not all(self._is_held[block] for block in blocks):
            raise ValueError(f"a block of {list(blocks)} is freed twice")
        for block in blocks:
            self._is_held[block] = 0
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free, once, or held."""
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert not any(self._is_held[block] for block in self._free), "a free block is marked as held"
        assert sum(self._is_held) + len(self._free) == self.num_blocks, "a block is neither free nor held"
