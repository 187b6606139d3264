"""Counts what the engine does, step by step. Knows no metrics library: `serving.triton_metrics` publishes."""

from __future__ import annotations

from collections import Counter

from noria.engine.outputs import EngineStats
from noria.scheduler_output import SchedulerOutput
from noria.scheduling.scheduler import Scheduler
from noria.sequence import FinishReason


class StatsCounter:
    """Adds up SchedulerOutputs and request ends into an EngineStats."""

    def __init__(self, num_kv_blocks: int, block_size: int) -> None:
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._counts: Counter[str] = Counter()

    def count_step(self, output: SchedulerOutput) -> None:
        """A decision without rows only copies blocks: it is no step."""
        num_useful = sum(not row.is_padding for row in output.rows)
        is_step = bool(output.rows)
        self._counts.update(
            num_steps=int(is_step),
            num_slot_steps=output.num_slots * is_step,
            num_useful_slot_steps=num_useful,
            num_rows=len(output.rows),
            num_kv_allocated_slot_steps=output.num_allocated_blocks * self._block_size * is_step,
            num_kv_live_slot_steps=output.num_live_kv_tokens * is_step,
            num_computed_tokens=sum(len(row.token_ids) for row in output.rows if not row.is_padding),
            num_preemptions=len(output.preempted_request_ids),
            num_swap_outs=len(output.swapped_out_request_ids),
            num_swapped_blocks=len(output.block_copies),
            num_recomputed_tokens=output.num_lost_tokens,
            num_prefix_tokens=output.num_prefix_tokens,
            num_prefix_hit_tokens=output.num_prefix_hit_tokens,
        )

    def count_prompt(self, num_tokens: int) -> None:
        self._counts["num_prompt_tokens"] += num_tokens

    def count_generated(self) -> None:
        self._counts["num_generated_tokens"] += 1

    def count_end(self, reason: FinishReason, is_refused: bool) -> None:
        """is_refused: the queue was full. All ends but an answer are failures, some counted by their kind besides."""
        has_failed = reason not in (FinishReason.STOP, FinishReason.LENGTH)
        self._counts["num_failed" if has_failed else "num_finished"] += 1
        self._counts["num_rejected"] += is_refused
        self._counts["num_expired"] += reason is FinishReason.DEADLINE
        self._counts["num_cancelled"] += reason is FinishReason.CANCELLED

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        return EngineStats(
            **self._counts,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=scheduler.num_paused,
            num_kv_blocks=self._num_kv_blocks,
            num_kv_blocks_held=self._num_kv_blocks - scheduler.num_free_blocks,
            num_kv_blocks_cached=scheduler.num_cached_blocks,
        )
