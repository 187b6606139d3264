"""Gives sequences the blocks that their tokens need, and takes them back. Knows no policy: it never picks a victim.

A sequence joins with a promise: so many blocks that its table may grow to without asking again. Promised blocks are not
taken yet, but nobody else gets them; so a prompt that is computed in chunks always has room for its next chunk.

    |<------------------ pool.num_available ------------------>|
    |<--- promised to running sequences --->|<- num_unpromised ->|   growth beyond a promise and new promises
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from noria.scheduling.block_hash import extend_hashes
from noria.scheduling.block_pool import BlockPool
from noria.sequence import Sequence


class KVCacheManager:
    """Block tables over one pool. A sequence holds just the blocks that its computed tokens fill, the last in part."""

    def __init__(self, pool: BlockPool, block_size: int, has_prefix_cache: bool = False) -> None:
        self.pool = pool
        self.block_size = block_size
        self.has_prefix_cache = has_prefix_cache
        self._num_promised = 0

    @property
    def num_pool_tokens(self) -> int:
        return self.pool.num_blocks * self.block_size

    @property
    def num_unpromised(self) -> int:
        """Available blocks that no running sequence may count on."""
        return self.pool.num_available - self._num_promised

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the sequence's first tokens. One token at least is left to be computed."""
        blocks: list[int] = []
        if not self.has_prefix_cache:
            return blocks
        for index in range((sequence.num_tokens - 1) // self.block_size):
            extend_hashes(sequence, index + 1, self.block_size)
            block = self.pool.find(sequence.block_hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_blocks_to_join(self, num_tokens: int, prefix: list[int]) -> int:
        """Unpromised blocks that a promise of `num_tokens` tokens takes, beside those that others hold already."""
        return self.num_blocks_for(num_tokens) - sum(self.pool.ref_count(block) > 0 for block in prefix)

    def join(self, sequence: Sequence, num_tokens: int, prefix: list[int]) -> None:
        """Promise blocks for `num_tokens` tokens, `prefix` being computed. The caller has checked that they fit."""
        self.pool.acquire(prefix)
        sequence.block_table.extend(prefix)
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(prefix) * self.block_size
        sequence.num_published_blocks = len(prefix)
        sequence.num_promised_blocks = self.num_blocks_for(num_tokens)
        self._num_promised += self._num_owed(sequence)

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Slots for the next `num_new_tokens` tokens to be computed: all of them, or none and False."""
        num_tokens = sequence.num_computed_tokens + num_new_tokens
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        num_owed = self._num_owed(sequence)
        if num_missing - num_owed > self.num_unpromised:
            return False
        blocks = self.pool.allocate(num_missing)
        if blocks is None:
            return False
        self._num_promised -= min(num_missing, num_owed)
        sequence.block_table.extend(blocks)
        return True

    def must_claim(self, sequence: Sequence) -> bool:
        """Whether its next token takes a block that it was not promised."""
        is_full = sequence.num_computed_tokens >= len(sequence.block_table) * self.block_size
        return is_full and not self._num_owed(sequence)

    def num_blocks_freed(self, sequences: Iterable[Sequence], kept: Iterable[int]) -> list[int]:
        """How many more blocks would be unpromised without the first sequence, without the first two, and so on, if
        the blocks in `kept` were still in use."""
        kept = set(kept)
        num_holders_gone: Counter[int] = Counter()
        totals, total = [], 0
        for sequence in sequences:
            total += self._num_owed(sequence)
            for block in sequence.block_table:
                num_holders_gone[block] += 1
                total += num_holders_gone[block] == self.pool.ref_count(block) and block not in kept
            totals.append(total)
        return totals

    def publish(self, sequence: Sequence) -> None:
        """Let others share the blocks that are wholly computed by now."""
        if not self.has_prefix_cache:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        extend_hashes(sequence, num_full, self.block_size)
        for index in range(sequence.num_published_blocks, num_full):
            self.pool.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_published_blocks = num_full

    def distrust(self, sequence: Sequence) -> None:
        """The sequence's computation went wrong: nobody else is to find its blocks."""
        self.pool.unpublish(sequence.block_table)

    def free(self, sequence: Sequence) -> None:
        """Every block of the sequence goes back, and what it was promised; nothing of it is computed any more."""
        self._num_promised -= self._num_owed(sequence)
        # the end of a context is worth less to others than its beginning, so it is evicted first
        self.pool.free(sequence.block_table[::-1])
        # another list, so that a row under way tells whether the sequence has left and come back since
        sequence.block_table = []
        sequence.num_promised_blocks = sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless reference counts and promises are just those of `sequences`."""
        self.pool.check_integrity()
        sequences = list(sequences)
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        for block, count in held.items():
            assert self.pool.ref_count(block) == count, f"block {block} is in {count} tables"
        assert len(held) == self.pool.num_held, f"{self.pool.num_held} blocks are held, {len(held)} are in tables"
        assert self._num_promised == sum(self._num_owed(sequence) for sequence in sequences)
        assert self.num_unpromised >= 0, "more blocks are promised than there are"

    def _num_owed(self, sequence: Sequence) -> int:
        return max(0, sequence.num_promised_blocks - len(sequence.block_table))
