"""Gives sequences the blocks that their tokens need, and takes them back. Knows no policy: it never picks a victim."""

from __future__ import annotations

from collections.abc import Iterable

from noria.scheduling.block_pool import BlockPool
from noria.sequence import Sequence


class KVCacheManager:
    """Block tables over one pool. A sequence holds just the blocks that its computed tokens fill, the last in part."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    @property
    def num_pool_tokens(self) -> int:
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to add before the sequence's first `num_tokens` tokens have slots."""
        return max(0, self.num_blocks_for(num_tokens) - len(sequence.block_table))

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Slots for the next `num_new_tokens` tokens to be computed: all of them, or none and False."""
        num_missing = self.num_missing_blocks(sequence, sequence.num_computed_tokens + num_new_tokens)
        blocks = self.pool.allocate(num_missing)
        if blocks is None:
            return False
        sequence.block_table.extend(blocks)
        return True

    def free(self, sequence: Sequence) -> None:
        """Every block of the sequence goes back; what it had computed is gone."""
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the held blocks are just those of `sequences`, each block in one table."""
        self.pool.check_integrity()
        held = [block for sequence in sequences for block in sequence.block_table]
        assert len(set(held)) == len(held), "a block is in two tables"
        assert len(held) == self.pool.num_held, f"{self.pool.num_held} blocks are held, {len(held)} are in tables"
