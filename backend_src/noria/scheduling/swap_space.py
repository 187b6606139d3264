"""The host pool: where a preempted sequence's blocks may wait instead of being computed again. Block numbers only."""

from __future__ import annotations

from collections.abc import Iterable

from noria.scheduler_output import BlockCopy
from noria.scheduling.block_pool import BlockPool
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.sequence import Sequence


class SwapSpace:
    """Host blocks, and the copies that the runner is to make, in the order in which they were decided.

    The order matters: a host block that one copy empties may be the target of a later one.
    """

    def __init__(self, num_host_blocks: int) -> None:
        self._pool = BlockPool(num_host_blocks)
        self._copies: list[BlockCopy] = []

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Those decided since the last call."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def swap_out(self, sequence: Sequence, cache: KVCacheManager) -> bool:
        """Move what the sequence has computed to the host and free its blocks. False, and no change, without room."""
        num_computed = sequence.num_computed_tokens
        num_blocks = cache.num_blocks_for(num_computed)
        targets = self._pool.allocate(num_blocks) if num_blocks else None
        if targets is None:
            return False
        sources = sequence.block_table[:num_blocks]
        self._copies += [BlockCopy(*pair, is_swap_in=False) for pair in zip(sources, targets, strict=True)]
        cache.free(sequence)
        sequence.host_block_table = targets
        sequence.num_computed_tokens = num_computed
        return True

    def swap_in(self, sequence: Sequence, num_tokens: int, cache: KVCacheManager) -> None:
        """Back into the cache, with a promise of `num_tokens` tokens, which the caller has checked to fit."""
        num_computed, sources = sequence.num_computed_tokens, sequence.host_block_table
        cache.join(sequence, num_tokens, prefix=[])
        cache.allocate_slots(sequence, num_computed)
        self._copies += [BlockCopy(*pair, is_swap_in=True) for pair in zip(sources, sequence.block_table, strict=True)]
        sequence.num_computed_tokens = num_computed
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Free the sequence's host blocks."""
        self._pool.free(sequence.host_block_table)
        sequence.host_block_table = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the host blocks in use are just those of `sequences`."""
        self._pool.check_integrity()
        held = [block for sequence in sequences for block in sequence.host_block_table]
        assert len(set(held)) == len(held), "a host block is in two tables"
        assert len(held) == self._pool.num_held, f"{self._pool.num_held} host blocks are held, {len(held)} in tables"
