"""Publishes the engine's counts on Triton's metrics endpoint, labelled with model and version.

What each means is said in `engine.outputs.EngineStats`. A server without a metrics endpoint is noticed once, then left
alone.
"""

from __future__ import annotations

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from noria.engine.outputs import EngineStats

log = logging.getLogger(__name__)

# attribute of EngineStats -> (metric, help)
_COUNTERS = {
    "num_steps": ("noria_steps_total", "Steps computed"),
    "num_slot_steps": ("noria_slot_steps_total", "Slots offered, max_num_seqs a step"),
    "num_useful_slot_steps": ("noria_useful_slot_steps_total", "Slots in which an unfinished sequence was computed"),
    "num_rows": ("noria_rows_total", "Rows computed, padding rows included"),
    "num_kv_allocated_slot_steps": (
        "noria_kv_allocated_slot_steps_total",
        "KV token slots allocated, summed over steps",
    ),
    "num_kv_live_slot_steps": (
        "noria_kv_live_slot_steps_total",
        "KV tokens of unfinished sequences, summed over steps",
    ),
    "num_computed_tokens": ("noria_computed_tokens_total", "Tokens computed, recomputed ones included"),
    "num_prompt_tokens": ("noria_prompt_tokens_total", "Prompt tokens accepted"),
    "num_generated_tokens": ("noria_generation_tokens_total", "Tokens generated"),
    "num_preemptions": ("noria_preemptions_total", "Sequences sent back to the queue for want of blocks"),
    "num_swap_outs": ("noria_swap_outs_total", "Preempted sequences whose blocks went to the host pool"),
    "num_swapped_blocks": ("noria_swapped_blocks_total", "Blocks copied to the host pool or back"),
    "num_recomputed_tokens": ("noria_recomputed_tokens_total", "Tokens computed again after a preemption"),
    "num_prefix_tokens": ("noria_prefix_tokens_total", "Known tokens of sequences that joined the batch"),
    "num_prefix_hit_tokens": ("noria_prefix_hit_tokens_total", "Those of them found in the prefix cache"),
    "num_finished": ("noria_requests_finished_total", "Sequences that ended with stop or length"),
    "num_failed": ("noria_requests_failed_total", "Sequences that were refused, cancelled, late or failed"),
    "num_rejected": ("noria_requests_rejected_total", "Failed sequences that met a full queue"),
    "num_expired": ("noria_requests_expired_total", "Failed sequences whose deadline passed"),
    "num_cancelled": ("noria_requests_cancelled_total", "Failed sequences whose client left or did not read"),
}
_GAUGES = {
    "num_running": ("noria_num_requests_running", "Unfinished sequences in the batch"),
    "num_waiting": ("noria_num_requests_waiting", "Sequences that wait for a slot"),
    "num_paused": ("noria_num_requests_paused", "Sequences set aside until their text is taken"),
    "num_kv_blocks": ("noria_kv_blocks", "Blocks in the KV cache"),
    "num_kv_blocks_held": ("noria_kv_blocks_held", "Blocks held by sequences"),
    "num_kv_blocks_cached": ("noria_kv_blocks_cached", "Blocks that nobody holds, kept for the prefixes in them"),
}


class TritonMetrics:
    """Counters grow by the difference to the last publication, gauges are set."""

    def __init__(self, model_name: str, model_version: str) -> None:
        self._labels = {"model": model_name, "version": model_version}
        # a family that is collected takes its metrics with it
        self._families: list[Any] = []
        self._last = EngineStats()
        try:
            self._counters = {
                name: self._metric(*words, pb_utils.MetricFamily.COUNTER) for name, words in _COUNTERS.items()
            }
            self._gauges = {name: self._metric(*words, pb_utils.MetricFamily.GAUGE) for name, words in _GAUGES.items()}
            self._utilisation = self._metric(
                "noria_slot_utilisation",
                "Useful share of the slots offered since the start",
                pb_utils.MetricFamily.GAUGE,
            )
            self._is_on = True
        except Exception as error:
            log.warning("the server offers no custom metrics: %s", error)
            self._is_on = False

    def _metric(self, name: str, description: str, kind: Any) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return family.Metric(labels=self._labels)

    def publish(self, stats: EngineStats) -> None:
        if not self._is_on:
            return
        for name, metric in self._counters.items():
            gain = getattr(stats, name) - getattr(self._last, name)
            if gain:
                metric.increment(gain)
        for name, metric in self._gauges.items():
            metric.set(getattr(stats, name))
        if stats.num_slot_steps:
            self._utilisation.set(stats.num_useful_slot_steps / stats.num_slot_steps)
        self._last = stats
