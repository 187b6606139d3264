"""How full the engine is between two steps, as numbers. Knows no policy and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noria.scheduling.running_batch import RunningBatch
from noria.scheduling.waiting_queue import WaitingQueue
from noria.sequence import SequenceStatus


# made after every step, so not frozen for the same reason as ScheduledSequence
@dataclass(slots=True)
class Occupancy:
    """Sequences and their tokens; those that are paused are in neither.

    max_num_seqs: slots. num_running: sequences in them that have not finished; num_running_tokens: of these, with keys
        and values in the cache.
    num_waiting_by_level: every level is there. num_waiting_tokens: known tokens, prompts and what was generated before
        a preemption.
    """

    max_num_seqs: int
    num_running: int
    num_running_tokens: int
    num_waiting_by_level: Mapping[int, int]
    num_waiting_tokens: int


def occupancy_of(batch: RunningBatch, waiting: WaitingQueue) -> Occupancy:
    """Costs as much as there are slots and levels, however many wait."""
    # without the property is_finished, which takes three times as long, after every step
    finished = SequenceStatus.FINISHED
    live = [sequence.num_computed_tokens for sequence in batch.sequences if sequence.status is not finished]
    return Occupancy(batch.max_num_seqs, len(live), sum(live), waiting.num_by_level, waiting.num_tokens)
