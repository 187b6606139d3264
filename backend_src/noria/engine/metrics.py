"""Counts what the engine does, step by step. Knows no metrics library: `serving.triton_metrics` publishes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

from noria.engine.outputs import EngineStats, LevelStats
from noria.scheduler_output import SchedulerOutput
from noria.scheduling.scheduler import Scheduler
from noria.sequence import FinishReason

_COUNTER_BY_REASON = {
    FinishReason.STOP: "num_stopped",
    FinishReason.LENGTH: "num_at_length",
    FinishReason.DEADLINE: "num_expired",
    FinishReason.CANCELLED: "num_cancelled",
}


class StatsCounter:
    """Adds up SchedulerOutputs and request ends into an EngineStats. unix_clock: seconds, for the heartbeat."""

    def __init__(self, num_kv_blocks: int, block_size: int, unix_clock: Callable[[], float] = time.time) -> None:
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._unix_clock = unix_clock
        self._counts: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._last_step: dict[str, int] = {}
        # by level
        self._ends: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def count_step(self, output: SchedulerOutput, late_request_ids: tuple[int, ...] = ()) -> None:
        """A decision without rows only copies blocks: it is no step.

        late_request_ids: requests that had ended when the step was launched; their rows are as useless as padding.
        """
        num_useful = num_computed = num_context = num_context_tokens = 0
        for row in output.rows:
            if row.is_padding or row.request_id in late_request_ids:
                continue
            num_tokens = len(row.token_ids)
            num_useful += 1
            num_computed += num_tokens
            if num_tokens > 1 or row.sampling is None:
                num_context += 1
                num_context_tokens += num_tokens
        is_step = bool(output.rows)
        self._counts.update(
            num_steps=int(is_step),
            num_slot_steps=output.num_slots * is_step,
            num_useful_slot_steps=num_useful,
            num_rows=len(output.rows),
            num_kv_allocated_slot_steps=output.num_allocated_blocks * self._block_size * is_step,
            num_kv_live_slot_steps=output.num_live_kv_tokens * is_step,
            num_computed_tokens=num_computed,
            num_preemptions=len(output.preempted_request_ids),
            num_swap_outs=len(output.swapped_out_request_ids),
            num_swapped_blocks=len(output.block_copies),
            num_recomputed_tokens=output.num_lost_tokens,
            num_prefix_tokens=output.num_prefix_tokens,
            num_prefix_hit_tokens=output.num_prefix_hit_tokens,
        )
        if is_step:
            self._last_step = {
                "num_context_requests": num_context,
                "num_context_tokens": num_context_tokens,
                "num_decode_requests": num_useful - num_context,
                "num_empty_slots": output.num_slots - num_useful,
            }

    def count_step_time(self, seconds: float) -> None:
        """Of one call of `Engine.step`; where steps overlap, the sum still counts no second twice."""
        self._step_seconds += seconds

    def count_prompt(self, num_tokens: int) -> None:
        self._counts["num_prompt_tokens"] += num_tokens

    def count_generated(self) -> None:
        self._counts["num_generated_tokens"] += 1

    def count_invalid(self) -> None:
        """A request that could never be served."""
        self._counts["num_invalid"] += 1

    def count_end(self, level: int, reason: FinishReason, is_refused: bool = False) -> None:
        """is_refused: the queue was full. All ends but an answer are failures, some counted by their kind besides."""
        counts = self._ends[level]
        if reason in _COUNTER_BY_REASON:
            counts[_COUNTER_BY_REASON[reason]] += 1
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            counts["num_failed"] += 1
        counts["num_rejected"] += is_refused

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        occupancy = scheduler.occupancy()
        last_step = self._last_step if occupancy.num_running else {}
        return EngineStats(
            **self._counts,
            **last_step,
            step_seconds=self._step_seconds,
            max_num_seqs=occupancy.max_num_seqs,
            num_running=occupancy.num_running,
            num_running_tokens=occupancy.num_running_tokens,
            num_waiting_tokens=occupancy.num_waiting_tokens,
            num_paused=scheduler.num_paused,
            block_size=self._block_size,
            num_kv_blocks=self._num_kv_blocks,
            num_kv_blocks_held=self._num_kv_blocks - scheduler.num_free_blocks,
            num_kv_blocks_cached=scheduler.num_cached_blocks,
            heartbeat_s=self._unix_clock(),
            levels=tuple(
                LevelStats(level, num_waiting, **self._ends[level])
                for level, num_waiting in occupancy.num_waiting_by_level.items()
            ),
        )
