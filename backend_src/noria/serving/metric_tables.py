"""The tables of what Noria publishes: name, help, and where the value comes from. `metric_names` adds the labels.

Three sets of names for the same figures: noria_*, and those of vLLM and of TensorRT-LLM's Triton backend, which
routers, autoscalers and dashboards already map. What each is for is said in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable

from noria.engine.outputs import EngineStats, LevelStats
from noria.engine.request_timings import RequestTimings

ReadStats = Callable[[EngineStats], float]
ReadLevel = Callable[[LevelStats], float]
ReadTimings = Callable[[RequestTimings], float | None]


def _usage(stats: EngineStats) -> float:
    # to four digits, so that it is never written as 3e-05, which some readers take for 3
    return round(stats.num_kv_blocks_held / stats.num_kv_blocks, 4) if stats.num_kv_blocks else 0.0


def _utilisation(stats: EngineStats) -> float:
    return stats.num_useful_slot_steps / stats.num_slot_steps if stats.num_slot_steps else 0.0


def _answered(read: ReadTimings) -> ReadTimings:
    """Of requests that ended with an answer only."""
    return lambda timings: read(timings) if timings.is_answer else None


COUNTERS: dict[str, tuple[str, ReadStats]] = {
    "noria_steps_total": ("Steps computed", lambda stats: stats.num_steps),
    "noria_step_seconds_total": ("Time spent in steps", lambda stats: stats.step_seconds),
    "noria_slot_steps_total": ("Slots offered, max_num_seqs a step", lambda stats: stats.num_slot_steps),
    "noria_useful_slot_steps_total": (
        "Slots in which an unfinished sequence was computed",
        lambda stats: stats.num_useful_slot_steps,
    ),
    "noria_rows_total": ("Rows computed, padding rows included", lambda stats: stats.num_rows),
    "noria_kv_allocated_slot_steps_total": (
        "KV token slots allocated, summed over steps",
        lambda stats: stats.num_kv_allocated_slot_steps,
    ),
    "noria_kv_live_slot_steps_total": (
        "KV tokens of unfinished sequences, summed over steps",
        lambda stats: stats.num_kv_live_slot_steps,
    ),
    "noria_computed_tokens_total": (
        "Tokens computed, recomputed ones included",
        lambda stats: stats.num_computed_tokens,
    ),
    "noria_prompt_tokens_total": ("Prompt tokens accepted", lambda stats: stats.num_prompt_tokens),
    "noria_generation_tokens_total": ("Tokens generated", lambda stats: stats.num_generated_tokens),
    "noria_preemptions_total": (
        "Sequences sent back to the queue for want of blocks",
        lambda stats: stats.num_preemptions,
    ),
    "noria_swap_outs_total": (
        "Preempted sequences whose blocks went to the host pool",
        lambda stats: stats.num_swap_outs,
    ),
    "noria_swapped_blocks_total": ("Blocks copied to the host pool or back", lambda stats: stats.num_swapped_blocks),
    "noria_recomputed_tokens_total": (
        "Tokens computed again after a preemption",
        lambda stats: stats.num_recomputed_tokens,
    ),
    "noria_prefix_tokens_total": (
        "Known tokens of sequences that joined the batch",
        lambda stats: stats.num_prefix_tokens,
    ),
    "noria_prefix_hit_tokens_total": (
        "Those of them found in the prefix cache",
        lambda stats: stats.num_prefix_hit_tokens,
    ),
    "noria_requests_invalid_total": ("Requests refused as invalid", lambda stats: stats.num_invalid),
}
LEVEL_COUNTERS: dict[str, tuple[str, ReadLevel]] = {
    "noria_requests_finished_total": ("Sequences that ended with stop or length", lambda level: level.num_finished),
    "noria_requests_failed_total": (
        "Sequences that were refused, cancelled, late or failed",
        lambda level: level.num_failed,
    ),
    "noria_requests_rejected_total": ("Failed sequences that met a full queue", lambda level: level.num_rejected),
    "noria_requests_expired_total": ("Failed sequences whose deadline passed", lambda level: level.num_expired),
    "noria_requests_cancelled_total": (
        "Failed sequences whose client left or did not read",
        lambda level: level.num_cancelled,
    ),
}
GAUGES: dict[str, tuple[str, ReadStats]] = {
    "noria_slot_utilisation": ("Useful share of the slots offered since the start", _utilisation),
    "noria_max_num_seqs": ("Slots", lambda stats: stats.max_num_seqs),
    "noria_num_requests_running": ("Unfinished sequences in the batch", lambda stats: stats.num_running),
    "noria_num_requests_paused": ("Sequences set aside until their text is taken", lambda stats: stats.num_paused),
    "noria_num_tokens_running": ("KV tokens of sequences in the batch", lambda stats: stats.num_running_tokens),
    "noria_num_tokens_waiting": ("Known tokens of sequences that wait", lambda stats: stats.num_waiting_tokens),
    "noria_kv_blocks": ("Blocks in the KV cache", lambda stats: stats.num_kv_blocks),
    "noria_kv_blocks_held": ("Blocks held by sequences", lambda stats: stats.num_kv_blocks_held),
    "noria_kv_blocks_cached": (
        "Blocks that nobody holds, kept for the prefixes in them",
        lambda stats: stats.num_kv_blocks_cached,
    ),
    "noria_kv_usage": ("Share of the blocks that sequences hold", _usage),
    "noria_heartbeat_timestamp_seconds": (
        "When the engine's thread last showed that it turns, Unix time; 0 when unloaded",
        lambda stats: stats.heartbeat_s,
    ),
}
LEVEL_GAUGES: dict[str, tuple[str, ReadLevel]] = {
    "noria_num_requests_waiting": ("Sequences that wait for a slot", lambda level: level.num_waiting),
}

# the common objectives for a first token and for the time between two stand among these
_LATENCY_BUCKETS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0),
)
_GAP_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.0, 5.0, 10.0, 30.0),
)
_TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
_PREEMPTION_BUCKETS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
DISTRIBUTIONS: dict[str, tuple[str, tuple[float, ...], ReadTimings]] = {
    "noria_queue_time_seconds": (
        "From arrival to the first step, of all requests that came to one",
        _LATENCY_BUCKETS,
        lambda timings: timings.queue_s,
    ),
    "noria_time_to_first_token_seconds": (
        "From arrival to the first token, of answered requests",
        _LATENCY_BUCKETS,
        _answered(lambda timings: timings.ttft_s),
    ),
    "noria_time_per_output_token_seconds": (
        "Mean time between a request's tokens, of answered requests",
        _GAP_BUCKETS,
        _answered(lambda timings: timings.tpot_s),
    ),
    "noria_max_token_gap_seconds": (
        "Longest time between a request's tokens, of answered requests",
        _GAP_BUCKETS,
        _answered(lambda timings: timings.max_gap_s),
    ),
    "noria_e2e_request_latency_seconds": (
        "From arrival to the end, of answered requests",
        _LATENCY_BUCKETS,
        _answered(lambda timings: timings.e2e_s),
    ),
    "noria_request_prompt_tokens": (
        "Prompt tokens of answered requests",
        _TOKEN_BUCKETS,
        _answered(lambda timings: timings.num_prompt_tokens),
    ),
    "noria_request_generation_tokens": (
        "Tokens generated for answered requests",
        _TOKEN_BUCKETS,
        _answered(lambda timings: timings.num_output_tokens),
    ),
    "noria_request_preemptions": (
        "Times that answered requests were preempted",
        _PREEMPTION_BUCKETS,
        _answered(lambda timings: timings.num_preemptions),
    ),
}

# labels: model_name, as vLLM has it
VLLM_COUNTERS: dict[str, tuple[str, ReadStats]] = {
    "vllm:prompt_tokens_total": ("As noria_prompt_tokens_total", lambda stats: stats.num_prompt_tokens),
    "vllm:generation_tokens_total": ("As noria_generation_tokens_total", lambda stats: stats.num_generated_tokens),
    "vllm:num_preemptions_total": ("As noria_preemptions_total", lambda stats: stats.num_preemptions),
    "vllm:prefix_cache_queries_total": ("As noria_prefix_tokens_total", lambda stats: stats.num_prefix_tokens),
    "vllm:prefix_cache_hits_total": ("As noria_prefix_hit_tokens_total", lambda stats: stats.num_prefix_hit_tokens),
}
VLLM_GAUGES: dict[str, tuple[str, ReadStats]] = {
    "vllm:num_requests_running": ("As noria_num_requests_running", lambda stats: stats.num_running),
    "vllm:num_requests_waiting": ("As noria_num_requests_waiting", lambda stats: stats.num_waiting),
    "vllm:kv_cache_usage_perc": ("As noria_kv_usage, from 0 to 1", _usage),
    "vllm:gpu_cache_usage_perc": ("As noria_kv_usage, from 0 to 1", _usage),
}
# vllm:request_success_total by the label finished_reason; what a full queue refused is in none of them
VLLM_ENDS: dict[str, ReadStats] = {
    "stop": lambda stats: sum(level.num_stopped for level in stats.levels),
    "length": lambda stats: sum(level.num_at_length for level in stats.levels),
    "abort": lambda stats: stats.num_cancelled + stats.num_expired,
    "error": lambda stats: stats.num_failed - stats.num_rejected - stats.num_expired - stats.num_cancelled,
}
# the twin whose observations each has, of all levels together
VLLM_DISTRIBUTIONS = {
    "vllm:request_queue_time_seconds": "noria_queue_time_seconds",
    "vllm:time_to_first_token_seconds": "noria_time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds": "noria_time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds": "noria_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "noria_e2e_request_latency_seconds",
    "vllm:request_prompt_tokens": "noria_request_prompt_tokens",
    "vllm:request_generation_tokens": "noria_request_generation_tokens",
}

# name: help, a label, and the values of that label; besides it model and version
TRTLLM_GAUGES: dict[str, tuple[str, str, dict[str, ReadStats]]] = {
    "nv_trt_llm_request_metrics": (
        "Requests that the engine has, may have at once, computes, computes prompts of, and lets wait",
        "request_type",
        {
            "active": lambda stats: stats.num_running + stats.num_waiting + stats.num_paused,
            "max": lambda stats: stats.max_num_seqs,
            "scheduled": lambda stats: stats.num_running,
            "context": lambda stats: stats.num_context_requests,
            "waiting": lambda stats: stats.num_waiting,
        },
    ),
    # Triton's ORCA header is made of max, used and tokens_per
    "nv_trt_llm_kv_cache_block_metrics": (
        "KV cache blocks; tokens_per is a block's size, reused counts those found in the prefix cache",
        "kv_cache_block_type",
        {
            "max": lambda stats: stats.num_kv_blocks,
            "free": lambda stats: stats.num_kv_blocks - stats.num_kv_blocks_held,
            "used": lambda stats: stats.num_kv_blocks_held,
            "tokens_per": lambda stats: stats.block_size,
            "reused": lambda stats: stats.num_prefix_hit_tokens // max(1, stats.block_size),
            "fraction": _usage,
        },
    ),
}
TRTLLM_INFLIGHT: dict[str, tuple[str, str, dict[str, ReadStats]]] = {
    "nv_trt_llm_inflight_batcher_metrics": (
        "Of the last step, in flight",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": lambda stats: stats.num_context_tokens,
            "generation_requests": lambda stats: stats.num_decode_requests,
            "paused_requests": lambda stats: stats.num_paused,
        },
    ),
}
TRTLLM_CLOSED: dict[str, tuple[str, str, dict[str, ReadStats]]] = {
    "nv_trt_llm_v1_metrics": (
        "Of the last step of a closed batch",
        "v1_specific_metric",
        {
            "total_context_tokens": lambda stats: stats.num_context_tokens,
            "total_generation_tokens": lambda stats: stats.num_decode_requests,
            "empty_generation_slots": lambda stats: stats.num_empty_slots,
        },
    ),
}
