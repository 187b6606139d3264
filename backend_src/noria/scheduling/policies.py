"""Batching modes, who may join the batch and what becomes of a finished row; and all policies of a scheduler together.

Each mode is a small strategy object that answers questions about the batch and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from noria.scheduling.admission import Admission, Insertion
from noria.scheduling.prefill import Prefill
from noria.sequence import Sequence


class BatchingMode(Protocol):
    """What the scheduler asks of a mode.

    is_closed: a batch enters together and nobody joins it later. Finished sequences stay in it as padding rows, blocks
        and all, until the last ends; a step computes whatever its members need, whatever the budgets.
    """

    is_closed: bool

    def can_join(self, candidate: Sequence, running: SequenceOf[Sequence]) -> bool:
        """Whether the mode lets `candidate`, the head of the queue, join `running` at this step."""


class InFlight:
    """Iteration-level scheduling (Orca, OSDI'22): whoever waits takes a free slot at the next step."""

    is_closed = False

    def can_join(self, candidate: Sequence, running: SequenceOf[Sequence]) -> bool:
        return True


class ClosedBatch:
    """A batch that stays closed until its longest sequence ends, as `model.generate()` runs it.

    Members came in one call (`batch_id`); those that do not fit beside the others form the next batch.
    """

    is_closed = True

    def can_join(self, candidate: Sequence, running: SequenceOf[Sequence]) -> bool:
        has_started = any(member.num_computed_tokens > member.num_cached_tokens for member in running)
        if has_started or any(member.is_finished for member in running):
            return False
        return not running or running[0].request.batch_id == candidate.request.batch_id


@dataclass(frozen=True, slots=True)
class Policies:
    """All that a scheduler's choices follow. What the knobs mean is said in `EngineConfig`."""

    mode: BatchingMode
    admission: Admission
    insertion: Insertion
    prefill: Prefill
    has_separate_prefill: bool
    admission_headroom: float
    max_num_batched_tokens: int | None
    max_prefill_tokens: int | None
    max_batch_total_tokens: int | None
    max_preemptions: int
