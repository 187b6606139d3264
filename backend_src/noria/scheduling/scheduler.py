"""The scheduler: at every step, which sequences compute how many tokens, in which blocks.

One loop, three verbs: `schedule` decides, the runner computes, `update` takes the result in; or `abandon`, when the
runner failed. In between nothing else is called. `step_planner` decides a step; here requests come and end.

Where the runner computes on its own, `update` is done in two halves. `advance`, once a step is launched, counts it as
done but for the values of its tokens; then requests may come and end, and one more step be scheduled and launched,
before `take_result` of the first, and `advance` of the second. At most two steps are under way.
Blocks that are freed meanwhile may be given away at once, and be swapped: the device computes steps, copies included,
in the order of their launch, so that whoever gets a block writes to it after its last holder's row has.
Knows nothing of tensors, text, threads or clients, and has no clock: `now` is in seconds on the caller's.
"""

from __future__ import annotations

from noria.scheduler_output import ScheduledSequence, SchedulerOutput, StepResult
from noria.scheduling.deadlines import Deadlines
from noria.scheduling.integrity import check_places
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.occupancy import Occupancy, occupancy_of
from noria.scheduling.pace import Pace
from noria.scheduling.policies import Policies
from noria.scheduling.progress import Progress
from noria.scheduling.request_rules import RequestRules
from noria.scheduling.rows import make_padding_row, make_row
from noria.scheduling.running_batch import RunningBatch
from noria.scheduling.sequence_update import SequenceUpdate
from noria.scheduling.step_plan import StepPlan
from noria.scheduling.step_planner import StepPlanner
from noria.scheduling.swap_space import SwapSpace
from noria.scheduling.waiting_queue import WaitingQueue
from noria.sequence import FinishReason, Request, Sequence, SequenceStatus


class Scheduler:
    """Sequences that wait, run or are paused, over one block pool and, with `swap`, a pool on the host."""

    def __init__(
        self,
        policies: Policies,
        rules: RequestRules,
        cache: KVCacheManager,
        swap: SwapSpace | None,
        queue: WaitingQueue,
        max_num_seqs: int,
    ) -> None:
        self._mode = policies.mode
        self._rules = rules
        self._cache = cache
        self._swap = swap
        self._waiting = queue
        self._batch = RunningBatch(cache, swap, max_num_seqs)
        self._planner = StepPlanner(policies, cache, queue, self._batch)
        self._sequences: dict[int, Sequence] = {}
        self._paused: dict[int, Sequence] = {}
        self._progress = Progress(self._sequences, cache, queue, self._end)
        self._deadlines = Deadlines(self._sequences)
        self._pace = Pace()
        self._now = 0.0
        self._num_arrivals = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        """Sequences in the batch that have not finished."""
        return self._batch.num_live

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, those in the prefix cache included."""
        return self._cache.pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        return self._cache.pool.num_cached

    @property
    def has_work(self) -> bool:
        """Something waits or runs; a paused sequence does neither."""
        return len(self._sequences) > len(self._paused)

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.next

    def occupancy(self) -> Occupancy:
        return occupancy_of(self._batch, self._waiting)

    def level_of(self, request: Request) -> int:
        """The priority level that it would have. Raises InvalidRequest if it could never be served."""
        return self._rules.check(request)

    def find(self, request_id: int) -> Sequence | None:
        """The live sequence of that id, to be read only."""
        return self._sequences.get(request_id)

    def live_request_ids(self) -> list[int]:
        return list(self._sequences)

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. Raises InvalidRequest if it could never fit, Overloaded if the queue is full."""
        if request.request_id in self._sequences:
            raise ValueError(f"request_id {request.request_id} is live already")
        self._now = max(self._now, now)
        level = self._rules.check(request)
        sequence = Sequence(request, level, self._num_arrivals, now, self._rules.deadline(request, now))
        num_free_slots = self._batch.max_num_seqs - len(self._batch.sequences)
        # slots that nobody could take in the last step, for want of blocks, will not empty the queue in the next
        num_leaving = 0 if self._planner.is_blocked else num_free_slots
        self._waiting.check_room(sequence, num_leaving, self._pace.retry_hint(self._now))
        self._num_arrivals += 1
        self._waiting.add(sequence)
        self._sequences[request.request_id] = sequence
        if sequence.deadline is not None:
            self._deadlines.add(sequence.deadline, request.request_id)

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """End a live sequence wherever it is: cancelled, out of time, or at a stop string. False if it is not live.

        Its blocks are free when this returns, except that a closed batch keeps an answered member's until it ends.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, reason)
        self._batch.drop_finished(keeps_until_last=self._mode.is_closed)
        return True

    def pause(self, request_id: int) -> bool:
        """Set a sequence aside until `resume`: its slot and blocks go to others. False if that is not possible.

        A closed batch pauses nobody: its members are computed to the end whether anyone reads them or not.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or request_id in self._paused or self._mode.is_closed:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.leave_early(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.PAUSED
        self._paused[request_id] = sequence
        return True

    def resume(self, request_id: int) -> bool:
        """Back into the queue, in the place of its arrival. False if it is not paused."""
        sequence = self._paused.pop(request_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.SWAPPED if sequence.host_block_table else SequenceStatus.WAITING
        self._waiting.add(sequence)
        return True

    def expire(self, now: float) -> list[int]:
        """End every live sequence whose deadline has passed; their ids."""
        self._now = max(self._now, now)
        expired = self._deadlines.pop_passed(now)
        for request_id in expired:
            self.finish(request_id, FinishReason.DEADLINE)
        return expired

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Decide one step. Without rows there is nothing to compute, but there may be copies to make."""
        self._now = max(self._now, now)
        plan = self._planner.plan(self._now)
        rows, num_live, num_live_kv_tokens = self._rows(plan)
        if rows:
            self._step += 1
        return SchedulerOutput(
            step=self._step,
            rows=rows,
            block_copies=self._swap.take_copies() if self._swap else (),
            admitted_request_ids=tuple(sequence.request_id for sequence in plan.admitted),
            preempted_request_ids=tuple(sequence.request_id for sequence in plan.preempted),
            swapped_out_request_ids=tuple(sequence.request_id for sequence in plan.swapped_out),
            num_running=num_live,
            num_waiting=len(self._waiting),
            num_slots=self._batch.max_num_seqs,
            num_allocated_blocks=self._cache.pool.num_held,
            num_cached_blocks=self._cache.pool.num_cached,
            num_live_kv_tokens=num_live_kv_tokens,
            num_prefix_tokens=plan.num_prefix_tokens,
            num_prefix_hit_tokens=plan.num_prefix_hit_tokens,
            num_lost_tokens=plan.num_lost_tokens,
        )

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in what the runner computed for `output`: progress, new tokens, ends."""
        self.advance(output)
        return self.take_result(output, result)

    def advance(self, output: SchedulerOutput) -> tuple[int, ...]:
        """`output` has been launched. The ids of rows whose request has ended since it was scheduled."""
        return self._progress.advance(output)

    def can_run_ahead(self, output: SchedulerOutput) -> bool:
        """Whether to decide a step before the result of `output`, which has been advanced, is known.

        Not where a penalty needs the values of its tokens. Nor where somebody would be preempted for blocks that the
        result might free: that would be right, but dear.
        """
        needs_values = any(
            row.sampling is not None and row.sampling.params.has_penalties and row.request_id in self._sequences
            for row in output.rows
        )
        return not needs_values and not self._planner.would_preempt()

    def take_result(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take in the tokens and ends of `output`, which has been advanced."""
        num_live = len(self._sequences)
        updates = self._progress.take(output, result)
        if len(self._sequences) < num_live:
            self._batch.drop_finished(keeps_until_last=self._mode.is_closed)
        return updates

    def abandon(self, output: SchedulerOutput) -> list[int]:
        """The step failed: end the sequences in it; their ids. Others lose what may not have been copied."""
        ended = [row.request_id for row in output.rows if row.request_id in self._sequences]
        for request_id in ended:
            self._cache.distrust(self._sequences[request_id])
            self.finish(request_id, FinishReason.ERROR)
        if output.block_copies:
            self._forget_copies(output)
        return ended

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, places or counters contradict each other."""
        running = self._batch.sequences
        off_batch = [*self._waiting, *self._paused.values()]
        self._cache.check_integrity(running)
        if self._swap is not None:
            self._swap.check_integrity(off_batch)
        check_places(running, off_batch, self._sequences)
        assert len(running) <= self._batch.max_num_seqs

    def _rows(self, plan: StepPlan) -> tuple[tuple[ScheduledSequence, ...], int, int]:
        """The rows of a step, how many live sequences are in the batch, and tokens with a slot once it has run."""
        rows = []
        num_tokens_by_id = plan.num_tokens
        num_live = num_live_kv_tokens = 0
        for sequence in self._batch.sequences:
            if sequence.status is SequenceStatus.FINISHED:
                rows.append(make_padding_row(sequence, self._cache.block_size))
                continue
            num_live += 1
            num_tokens = num_tokens_by_id.get(sequence.request.request_id, 0)
            num_live_kv_tokens += sequence.num_computed_tokens + num_tokens
            if num_tokens:
                rows.append(make_row(sequence, num_tokens))
        return tuple(rows), num_live, num_live_kv_tokens

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            self._leave_queue(sequence)
        is_answer = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (self._mode.is_closed and is_answer):
            self._cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._pace.note_end(self._now)
        del self._sequences[sequence.request_id]

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.PAUSED:
            del self._paused[sequence.request_id]
        else:
            self._waiting.remove(sequence)
        self._batch.drop_computed(sequence)

    def _forget_copies(self, output: SchedulerOutput) -> None:
        """Whoever went to the host or came back in a failed step starts again, as the copies may not have been made."""
        for sequence in [*self._waiting, *self._paused.values()]:
            if sequence.host_block_table:
                self._batch.drop_computed(sequence)
                sequence.status = (
                    SequenceStatus.PAUSED if sequence.request_id in self._paused else SequenceStatus.WAITING
                )
        for request_id in output.admitted_request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.status is SequenceStatus.RUNNING:
                self._cache.distrust(sequence)
                self._batch.sequences.remove(sequence)
                self._cache.free(sequence)
                sequence.status = SequenceStatus.WAITING
                self._waiting.add(sequence)
