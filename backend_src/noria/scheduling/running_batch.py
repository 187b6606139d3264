"""The sequences that hold a slot: how they get into the batch and out of it, with their blocks.

Knows the cache and the host pool; decides nothing.
"""

from __future__ import annotations

from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.step_plan import StepPlan
from noria.scheduling.swap_space import SwapSpace
from noria.sequence import Sequence, SequenceStatus


class RunningBatch:
    """Sequences in the order in which they joined. swap: None recomputes what a preempted sequence had computed."""

    def __init__(self, cache: KVCacheManager, swap: SwapSpace | None, max_num_seqs: int) -> None:
        self.sequences: list[Sequence] = []
        self.max_num_seqs = max_num_seqs
        self._cache = cache
        self._swap = swap

    @property
    def has_free_slot(self) -> bool:
        return len(self.sequences) < self.max_num_seqs

    @property
    def num_live(self) -> int:
        return sum(not sequence.is_finished for sequence in self.sequences)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence can start from; none for one that comes back from the host with its own."""
        return [] if sequence.host_block_table else self._cache.find_prefix(sequence)

    def join(self, sequence: Sequence, num_reserved_tokens: int, prefix: list[int], plan: StepPlan) -> None:
        """Takes a slot, with blocks promised for its reserved tokens. The caller has checked that all that is there."""
        if sequence.host_block_table and self._swap is not None:
            self._swap.swap_in(sequence, num_reserved_tokens, self._cache)
        else:
            self._cache.join(sequence, num_reserved_tokens, prefix)
            plan.num_prefix_tokens += sequence.num_tokens
            plan.num_prefix_hit_tokens += sequence.num_cached_tokens
            num_lost = max(0, sequence.num_dropped_tokens - sequence.num_cached_tokens)
            sequence.num_lost_tokens += num_lost
            plan.num_lost_tokens += num_lost
        sequence.num_dropped_tokens = 0
        sequence.status = SequenceStatus.RUNNING
        self.sequences.append(sequence)
        plan.admitted.append(sequence)

    def leave_early(self, sequence: Sequence) -> bool:
        """Give up slot and blocks, to come back later. Whether what it had computed is kept on the host."""
        self.sequences.remove(sequence)
        if self._swap is not None and self._swap.swap_out(sequence, self._cache):
            sequence.status = SequenceStatus.SWAPPED
            return True
        sequence.num_dropped_tokens = sequence.num_computed_tokens
        self._cache.free(sequence)
        sequence.status = SequenceStatus.WAITING
        return False

    def drop_computed(self, sequence: Sequence) -> None:
        """What a sequence keeps on the host is worthless, or not needed any more."""
        if sequence.host_block_table and self._swap is not None:
            self._swap.drop(sequence)
        sequence.num_dropped_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0

    def drop_finished(self, keeps_until_last: bool) -> None:
        """In flight, finished sequences leave at once; a closed batch leaves as a whole."""
        if keeps_until_last and self.num_live:
            return
        for sequence in self.sequences:
            if sequence.is_finished:
                self._cache.free(sequence)
        self.sequences = [sequence for sequence in self.sequences if not sequence.is_finished]
