"""Progress: what steps do to the sequences in them, when they are launched and when their results are there.

The two are apart so that the next step can be decided before the result is known. Knows no policy, and not how a
sequence ends, only that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from noria.scheduler_output import PLACEHOLDER, RowFailure, SampledToken, SchedulerOutput, StepResult
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.sequence_update import SequenceUpdate
from noria.scheduling.waiting_order import OUTPUT_WEIGHT
from noria.scheduling.waiting_queue import WaitingQueue
from noria.sequence import FinishReason, Sequence


class Progress:
    """Of the live sequences, by request id. end: takes one of them out of wherever it is."""

    def __init__(
        self,
        sequences: Mapping[int, Sequence],
        cache: KVCacheManager,
        queue: WaitingQueue,
        end: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._sequences = sequences
        self._cache = cache
        self._queue = queue
        self._end = end

    def advance(self, output: SchedulerOutput) -> tuple[int, ...]:
        """Every row's tokens count as computed, and a placeholder follows them where one is drawn.

        Returns the ids of rows whose sequence has ended since it was scheduled: nothing will come of those.
        """
        late = []
        for row in output.rows:
            sequence = self._sequences.get(row.request_id)
            if sequence is not None:
                sequence.num_computed_tokens += len(row.token_ids)
                if row.sampling is not None:
                    sequence.token_ids.append(PLACEHOLDER)
            elif not row.is_padding:
                late.append(row.request_id)
        return tuple(late)

    def take(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Put the values in place of the placeholders. Whoever has ended since the launch is passed over.

        Meanwhile the next step may have been decided, but not advanced: where a sequence still has its row's table,
        num_computed_tokens is what this step came to. One that was driven out may be anywhere, and in the batch again
        with blocks that the next step is still to fill.
        """
        updates = []
        for row in output.rows:
            sequence = self._sequences.get(row.request_id)
            if sequence is None or row.sampling is None:
                continue
            sampled = result[row.request_id]
            if isinstance(sampled, RowFailure):
                self._cache.distrust(sequence)
                self._end(sequence, FinishReason.ERROR)
                # a closed batch goes on computing its last token
                sequence.token_ids.pop()
                updates.append(SequenceUpdate(row.request_id, None, FinishReason.ERROR, sampled.message))
                continue
            # finite logits attest that all keys and values before them are finite, so others may share them
            if row.block_table is sequence.block_table:
                self._cache.publish(sequence)
            updates.append(self._take_token(sequence, sampled))
        return updates

    def _take_token(self, sequence: Sequence, sampled: SampledToken) -> SequenceUpdate:
        request = sequence.request
        sequence.token_ids[-1] = sampled.token_id
        if self._queue.is_fair:
            self._queue.charge(sequence, OUTPUT_WEIGHT)
        reason = None
        if sampled.token_id in request.stop_token_ids:
            reason = FinishReason.STOP
        elif sequence.is_complete:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason)
        return SequenceUpdate(request.request_id, sampled, reason)
