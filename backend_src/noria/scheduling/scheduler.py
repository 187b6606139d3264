"""The scheduler: at every step, which sequences compute how many tokens, in which blocks.

One loop, three verbs: `schedule` decides, the runner computes, `update` takes the result in. In between nothing else is
called. Knows nothing of tensors, text, threads or clients.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass

from noria.errors import InvalidRequest
from noria.scheduler_output import (
    RowFailure,
    SampledToken,
    SamplingInput,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.policies import BatchingMode
from noria.scheduling.waiting_queue import WaitingQueue
from noria.sequence import FinishReason, Request, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step gave one sequence. `token` is None when it failed; then `error` says why."""

    request_id: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    error: str | None = None


class Scheduler:
    """Waiting and running sequences over one block pool.

    max_num_seqs: rows in a step. max_num_batched_tokens: tokens in a step, where the mode has a budget.
    """

    def __init__(
        self,
        mode: BatchingMode,
        cache: KVCacheManager,
        queue: WaitingQueue,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._mode = mode
        self._cache = cache
        self._waiting = queue
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step = 0

    @property
    def num_running(self) -> int:
        """Sequences in the batch that have not finished."""
        return sum(not sequence.is_finished for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._cache.pool.num_free

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def find(self, request_id: int) -> Sequence | None:
        """The live sequence of that id, to be read only."""
        return self._sequences.get(request_id)

    def live_request_ids(self) -> list[int]:
        return list(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it could never fit, Overloaded if the queue is full."""
        num_tokens = len(request.prompt_token_ids) + request.params.max_tokens
        if num_tokens > self._cache.num_pool_tokens:
            raise InvalidRequest(
                f"the prompt ({len(request.prompt_token_ids)} tokens) and max_tokens ({request.params.max_tokens}) "
                f"must fit into the KV cache of {self._cache.num_pool_tokens} tokens"
            )
        if request.request_id in self._sequences:
            raise ValueError(f"request_id {request.request_id} is live already")
        sequence = Sequence(request)
        self._waiting.add(sequence, num_free_slots=self._max_num_seqs - len(self._running))
        self._sequences[request.request_id] = sequence
        if request.deadline is not None:
            self._forget_past_deadlines()
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """End a live sequence wherever it is: cancelled, out of time, or at a stop string. False if it is not live.

        Its blocks are free when this returns, except that a closed batch keeps an answered member's until it ends.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        self._end(sequence, reason)
        self._drop_finished_rows()
        return True

    def expire(self, now: float) -> list[int]:
        """End every live sequence whose deadline has passed; their ids."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if self.finish(request_id, FinishReason.DEADLINE):
                expired.append(request_id)
        return expired

    def schedule(self) -> SchedulerOutput:
        """Decide one step: running sequences first, decodes before prompts, then waiting ones as they came."""
        budget = self._max_num_batched_tokens if self._mode.has_token_budget else sys.maxsize
        num_scheduled: dict[int, int] = {}
        preempted: list[int] = []
        budget = self._schedule_running(num_scheduled, preempted, budget)
        if not preempted:
            self._admit(num_scheduled, budget)
        rows = tuple(
            self._row(sequence, num_scheduled) for sequence in self._running if self._has_row(sequence, num_scheduled)
        )
        if rows:
            self._step += 1
        return SchedulerOutput(
            step=self._step,
            rows=rows,
            preempted_request_ids=tuple(preempted),
            num_running=self.num_running,
            num_waiting=len(self._waiting),
            num_slots=self._max_num_seqs,
            num_allocated_blocks=self._cache.pool.num_held,
            num_live_kv_tokens=sum(
                sequence.num_computed_tokens + num_scheduled.get(sequence.request_id, 0)
                for sequence in self._running
                if not sequence.is_finished
            ),
        )

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in what the runner computed for `output`: progress, new tokens, ends."""
        updates = []
        for row in output.rows:
            if row.is_padding:
                continue
            sequence = self._sequences[row.request_id]
            sequence.num_computed_tokens += len(row.token_ids)
            if row.sampling is not None:
                updates.append(self._take(sequence, result[row.request_id]))
        self._drop_finished_rows()
        return updates

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, places or counters contradict each other."""
        self._cache.check_integrity(self._running)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table
        assert len(self._running) <= self._max_num_seqs
        live = [*self._waiting, *(sequence for sequence in self._running if not sequence.is_finished)]
        assert {sequence.request_id for sequence in live} == set(self._sequences)
        assert len(live) == len(self._sequences)
        for sequence in live:
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens

    def _forget_past_deadlines(self) -> None:
        """Those of requests that have ended, once they are the most: a deadline may lie years ahead."""
        if len(self._deadlines) > 2 * len(self._sequences) + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
            heapq.heapify(self._deadlines)

    def _schedule_running(self, num_scheduled: dict[int, int], preempted: list[int], budget: int) -> int:
        """Tokens for running sequences, oldest first within decodes and within prompts. Returns the budget left."""
        live = [sequence for sequence in self._running if not sequence.is_finished]
        for sequence in sorted(live, key=lambda sequence: sequence.num_uncomputed_tokens > 1):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            if num_new_tokens and self._allocate_or_preempt(sequence, num_new_tokens, num_scheduled, preempted):
                num_scheduled[sequence.request_id] = num_new_tokens
                budget -= num_new_tokens
        return budget

    def _allocate_or_preempt(
        self, sequence: Sequence, num_new_tokens: int, num_scheduled: dict[int, int], preempted: list[int]
    ) -> bool:
        """Slots for `sequence`, at the cost of the latest arrivals. False when it was itself the latest."""
        while not self._cache.allocate_slots(sequence, num_new_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            num_scheduled.pop(victim.request_id, None)
            preempted.append(victim.request_id)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue with nothing computed; its tokens, the output's too, are computed again."""
        self._running.remove(sequence)
        self._cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self._waiting.put_back(sequence)

    def _admit(self, num_scheduled: dict[int, int], budget: int) -> None:
        while budget > 0 and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.head()
            if sequence is None or not self._mode.can_admit(sequence, self._running, self._cache):
                return
            num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._cache.allocate_slots(sequence, num_new_tokens):
                return
            self._waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            num_scheduled[sequence.request_id] = num_new_tokens
            budget -= num_new_tokens

    def _has_row(self, sequence: Sequence, num_scheduled: dict[int, int]) -> bool:
        return sequence.is_finished or sequence.request_id in num_scheduled

    def _row(self, sequence: Sequence, num_scheduled: dict[int, int]) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        if sequence.is_finished:
            last_token = sequence.token_ids[-1:]
            held = min(start, len(sequence.block_table) * self._cache.block_size)
            return ScheduledSequence(sequence.request_id, last_token, held, sequence.block_table, None, is_padding=True)
        stop = start + num_scheduled[sequence.request_id]
        sampling = self._sampling(sequence) if stop == sequence.num_tokens else None
        return ScheduledSequence(
            sequence.request_id, sequence.token_ids[start:stop], start, sequence.block_table, sampling
        )

    def _sampling(self, sequence: Sequence) -> SamplingInput:
        request = sequence.request
        is_too_short = sequence.num_output_tokens < request.params.min_tokens
        return SamplingInput(
            params=request.params,
            seed=request.seed,
            position=sequence.num_tokens,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids if request.params.has_penalties else (),
            banned_token_ids=sorted(request.stop_token_ids) if is_too_short else (),
        )

    def _take(self, sequence: Sequence, sampled: SampledToken | RowFailure) -> SequenceUpdate:
        if isinstance(sampled, RowFailure):
            self._end(sequence, FinishReason.ERROR)
            return SequenceUpdate(sequence.request_id, None, FinishReason.ERROR, sampled.message)
        sequence.token_ids.append(sampled.token_id)
        reason = None
        if sampled.token_id in sequence.request.stop_token_ids:
            reason = FinishReason.STOP
        elif sequence.num_output_tokens >= sequence.request.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason)
        return SequenceUpdate(sequence.request_id, sampled, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        is_answer = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (self._mode.keeps_finished_rows and is_answer):
            self._cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._sequences[sequence.request_id]

    def _drop_finished_rows(self) -> None:
        """In flight, finished sequences leave at once; a closed batch leaves as a whole."""
        if self._mode.keeps_finished_rows and self.num_running:
            return
        for sequence in self._running:
            if sequence.is_finished:
                self._cache.free(sequence)
        self._running = [sequence for sequence in self._running if not sequence.is_finished]
