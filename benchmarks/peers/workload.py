"""The one workload that all peers get: noria_bench's seed lengths, prompts of random token ids.

Random ids make prompts of exact lengths in every peer and no two that begin alike.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from noria_bench.errors import BenchError
from noria_bench.workload import seed_workload
from peers.protocol import PeerRequest, PeerWorkload, workload_document

SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS = 64, 64
PREFILL_TOKENS = 512
NUM_PREFILLS = 5
# vocabularies begin with their special tokens; random text has none
FIRST_TOKEN_ID = 256


def make_workload(
    vocab_size: int, num_requests: int = 32, scale: float = 1.0, prompt_scale: float = 1.0, seed: int = 0
) -> PeerWorkload:
    """Outputs of 20, 50, 100 and 500 tokens times `scale`, shuffled; prompts of 16 to 512 times `prompt_scale`.

    The same arguments give the same workload. `single` and `prefills` do not scale. Raises BenchError.
    """
    for name, value in (("scale", scale), ("prompt_scale", prompt_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise BenchError(f"{name} must be a finite number above 0, not {value}")
    if num_requests < 1:
        raise BenchError(f"num_requests must be at least 1, not {num_requests}")
    if vocab_size <= FIRST_TOKEN_ID:
        raise BenchError(f"vocab_size must be above {FIRST_TOKEN_ID}, not {vocab_size}")
    rng = np.random.default_rng(seed)

    def request(num_prompt_tokens: int, max_tokens: int) -> PeerRequest:
        token_ids = rng.integers(FIRST_TOKEN_ID, vocab_size, num_prompt_tokens).tolist()
        return PeerRequest(tuple(token_ids), max_tokens)

    single = request(SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS)
    prefills = tuple(request(PREFILL_TOKENS, 1) for _ in range(NUM_PREFILLS))
    items = seed_workload(num_requests, seed=seed).items
    requests = (
        request(_scaled(item.num_prompt_tokens, prompt_scale), _scaled(item.max_tokens, scale)) for item in items
    )
    return PeerWorkload(tuple(requests), single, prefills)


def write_workload(path: Path, workload: PeerWorkload, **facts: Any) -> None:
    """facts: how it was made, such as its seed; `read_workload` does not need them."""
    path.write_text(json.dumps({**facts, **workload_document(workload)}) + "\n", encoding="utf-8")


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
