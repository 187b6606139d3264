"""Batching modes: when a waiting sequence may join the batch, and what becomes of a finished row.

Each is a small strategy object that answers questions about the batch and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from noria.errors import ConfigError
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.sequence import Sequence


class BatchingMode(Protocol):
    """What the scheduler asks of a mode.

    keeps_finished_rows: finished sequences stay in the batch as padding rows, blocks and all, until the last ends.
    has_token_budget: a step computes at most max_num_batched_tokens, longer prompts in chunks.
    """

    keeps_finished_rows: bool
    has_token_budget: bool

    def can_admit(self, candidate: Sequence, running: SequenceOf[Sequence], cache: KVCacheManager) -> bool:
        """Whether `candidate`, the head of the queue, may join `running` at this step, a free slot given."""


class InFlight:
    """Iteration-level scheduling (Orca, OSDI'22): whoever waits takes a free slot at the next step.

    The whole of the known tokens must fit into the free blocks, so that a prompt admitted in chunks does not
    drive out the very sequences that it was admitted beside.
    """

    keeps_finished_rows = False
    has_token_budget = True

    def can_admit(self, candidate: Sequence, running: SequenceOf[Sequence], cache: KVCacheManager) -> bool:
        return cache.num_missing_blocks(candidate, candidate.num_tokens) <= cache.pool.num_free


class ClosedBatch:
    """A batch that enters together and stays closed until its longest sequence ends, as `model.generate()` runs it.

    Members came in one call (`batch_id`). Every member's prompt and longest output must fit beside the others': a
    closed batch cannot preempt. Members that do not fit form the next batch.
    """

    keeps_finished_rows = True
    has_token_budget = False

    def can_admit(self, candidate: Sequence, running: SequenceOf[Sequence], cache: KVCacheManager) -> bool:
        if any(member.num_computed_tokens or member.is_finished for member in running):
            return False
        if running and running[0].request.batch_id != candidate.request.batch_id:
            return False
        num_blocks = sum(cache.num_blocks_for(_max_num_tokens(member)) for member in (*running, candidate))
        return num_blocks <= cache.pool.num_blocks


def _max_num_tokens(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.request.params.max_tokens


def batching_mode(name: str) -> BatchingMode:
    """The mode that engine.json calls `name`."""
    if name == "inflight":
        return InFlight()
    if name in ("static", "dynamic"):
        return ClosedBatch()
    raise ConfigError(f"batching_mode must be one of inflight, static, dynamic, not {name!r}")
