"""Counts what the engine does, step by step. Knows no metrics library: `serving.triton_metrics` publishes."""

from __future__ import annotations

from collections import Counter

from noria.engine.outputs import EngineStats
from noria.scheduler_output import SchedulerOutput


class StatsCounter:
    """Adds up SchedulerOutputs and request ends into an EngineStats."""

    def __init__(self, num_kv_blocks: int, block_size: int) -> None:
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._counts: Counter[str] = Counter()

    def count_step(self, output: SchedulerOutput) -> None:
        num_useful = sum(not row.is_padding for row in output.rows)
        self._counts.update(
            num_steps=1,
            num_slot_steps=output.num_slots,
            num_useful_slot_steps=num_useful,
            num_rows=len(output.rows),
            num_kv_allocated_slot_steps=output.num_allocated_blocks * self._block_size,
            num_kv_live_slot_steps=output.num_live_kv_tokens,
            num_computed_tokens=sum(len(row.token_ids) for row in output.rows if not row.is_padding),
            num_preemptions=len(output.preempted_request_ids),
        )

    def count_prompt(self, num_tokens: int) -> None:
        self._counts["num_prompt_tokens"] += num_tokens

    def count_generated(self) -> None:
        self._counts["num_generated_tokens"] += 1

    def count_end(self, has_failed: bool) -> None:
        self._counts["num_failed" if has_failed else "num_finished"] += 1

    def snapshot(self, num_running: int, num_waiting: int, num_free_blocks: int) -> EngineStats:
        return EngineStats(
            **self._counts,
            num_running=num_running,
            num_waiting=num_waiting,
            num_kv_blocks=self._num_kv_blocks,
            num_kv_blocks_held=self._num_kv_blocks - num_free_blocks,
        )
