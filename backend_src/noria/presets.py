"""The scheduling of other systems, as values for EngineConfig's keys: to be compared over one set of kernels.

Each sets policies, and sizes only where the policy is meaningless without its own. Sources: Orca, OSDI'22; vLLM V1's
defaults; text-generation-inference's launcher; TensorRT-LLM's executor (GUARANTEED_NO_EVICT, chunked context,
FIRST_COME_FIRST_SERVED); Transformers 5's FIFOScheduler, whose free-block safety margin is 0.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "orca": {
        "admission": "guaranteed_no_evict",
        "admission_headroom": 0.0,
        "insertion": "immediate",
        "chunked_prefill": False,
        "max_num_batched_tokens": 2**20,
        "max_prefill_tokens": None,
        "prefill_batching": "mixed",
        "prefill_order": "fcfs",
        "prefix_caching": False,
    },
    "vllm": {
        "admission": "max_utilization",
        "admission_headroom": 0.0,
        "insertion": "immediate",
        "chunked_prefill": True,
        "max_prefill_tokens": None,
        "prefill_batching": "mixed",
        "prefill_order": "fcfs",
        "preemption": "recompute",
        "prefix_caching": True,
    },
    "tgi": {
        "admission": "guaranteed_no_evict",
        "admission_headroom": 0.0,
        "insertion": "waiting_served_ratio",
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "chunked_prefill": False,
        "max_num_batched_tokens": 2**20,
        "max_prefill_tokens": 4096,
        "prefill_batching": "separate",
        "prefill_order": "fcfs",
        "prefix_caching": False,
    },
    "trtllm": {
        "admission": "guaranteed_no_evict",
        "admission_headroom": 0.0,
        "insertion": "immediate",
        "chunked_prefill": True,
        "max_prefill_tokens": None,
        "prefill_batching": "mixed",
        "prefill_order": "fcfs",
        "prefix_caching": True,
    },
    "transformers": {
        "admission": "max_utilization",
        "admission_headroom": 0.15,
        "insertion": "immediate",
        "chunked_prefill": True,
        "max_prefill_tokens": None,
        "prefill_batching": "mixed",
        "prefill_order": "fcfs",
        "preemption": "recompute",
        "prefix_caching": True,
    },
}
