"""The blocks of a KV cache as numbers: which are blank, held, or kept for the prefix in them. Knows no sequences.

Every block is in one state. `free` means: nobody holds it and nothing in it is worth keeping.

    free --allocate--> held (ref_count >= 1) --free--> free, or cached where its content is published
    cached --acquire--> held;  cached --allocate, when no block is free--> held, the least recently used first
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """A fixed number of equal blocks with reference counts and an index of published contents. All of it O(1) a block.

    Free blocks are handed out first freed, first used; cached ones only when there are no others.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._withheld: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available - len(self._withheld)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` block ids, each held once, or None and no change when fewer are available."""
        if num_blocks > self.num_available:
            return None
        blocks = [self._take_one() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more each."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks once each. Raises ValueError, and changes nothing, when one of them is not held.

        Those that nobody holds any more and that are published stay cached, to be evicted in the order given.
        """
        if len(set(blocks)) != len(blocks) or not all(self._ref_counts[block] for block in blocks):
            raise ValueError(f"a block of {list(blocks)} is freed twice")
        for block in blocks:
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._hash_by_block:
                self._cached[block] = None
            else:
                self._free.append(block)

    def find(self, content_hash: bytes) -> int | None:
        """The block of that content, if one is published."""
        return self._block_by_hash.get(content_hash)

    def publish(self, block: int, content_hash: bytes) -> None:
        """Let others find a held block by its content. Of two blocks of one content the first stays published."""
        if content_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[content_hash] = block
            self._hash_by_block[block] = content_hash

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Held blocks whose content is not to be trusted."""
        for block in blocks:
            content_hash = self._hash_by_block.pop(block, None)
            if content_hash is not None:
                del self._block_by_hash[content_hash]

    def withhold(self, num_blocks: int) -> int:
        """Take up to so many available blocks out of use, as another user of the memory would; how many it were."""
        num_blocks = min(num_blocks, self.num_available)
        self._withheld += [self._take_one() for _ in range(num_blocks)]
        return num_blocks

    def restore(self) -> None:
        """Put all withheld blocks back into use."""
        self._free.extend(self._withheld)
        self._withheld.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, cached, held or withheld, and the index agrees."""
        idle = [*self._free, *self._cached, *self._withheld]
        assert len(set(idle)) == len(idle), "a block is in two places"
        assert not any(self._ref_counts[block] for block in idle), "a block that is not in use is held"
        num_held = sum(count > 0 for count in self._ref_counts)
        assert num_held == self.num_held, f"{num_held} blocks have holders, {self.num_held} are neither free nor cached"
        assert all(block in self._hash_by_block for block in self._cached), "a cached block is not in the index"
        assert not any(block in self._hash_by_block for block in (*self._free, *self._withheld))
        assert {block: key for key, block in self._block_by_hash.items()} == self._hash_by_block

    def _take_one(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        self.unpublish([block])
        return block
