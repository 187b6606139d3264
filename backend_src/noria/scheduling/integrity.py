"""What must always hold of where sequences are. For tests, and for the engine's idle moments."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from noria.sequence import Sequence, SequenceStatus


def check_places(running: Collection[Sequence], off_batch: Collection[Sequence], live: Mapping[int, Sequence]) -> None:
    """Raises AssertionError unless every live sequence is in just one place, and holds what belongs there.

    off_batch: waiting, swapped out or paused.
    """
    for sequence in off_batch:
        is_swapped = bool(sequence.host_block_table)
        assert sequence.status is SequenceStatus.PAUSED or (sequence.status is SequenceStatus.SWAPPED) == is_swapped
        assert not sequence.block_table, "a sequence holds blocks outside the batch"
        assert bool(sequence.num_computed_tokens) == is_swapped
    for sequence in running:
        assert sequence.is_finished or sequence.status is SequenceStatus.RUNNING
    places = [*off_batch, *(sequence for sequence in running if not sequence.is_finished)]
    ids = [sequence.request_id for sequence in places]
    assert len(set(ids)) == len(ids), "a sequence is in two places"
    assert set(ids) == set(live), "a sequence is in no place"
