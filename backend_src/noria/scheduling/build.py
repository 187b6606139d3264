"""Puts a scheduler together from the engine's configuration."""

from __future__ import annotations

from noria.config import EngineConfig
from noria.scheduling.block_pool import BlockPool
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.policies import batching_mode
from noria.scheduling.scheduler import Scheduler
from noria.scheduling.waiting_queue import WaitingQueue


def build_scheduler(config: EngineConfig, num_blocks: int) -> Scheduler:
    """A scheduler in the mode and within the limits of `config`, over `num_blocks` free blocks."""
    mode = batching_mode(config.batching_mode)
    # requests for a closed batch wait in Triton's queue, which has limits of its own
    limits = (config.max_queue_size, config.max_queue_tokens) if mode.has_token_budget else (None, None)
    return Scheduler(
        mode=mode,
        cache=KVCacheManager(BlockPool(num_blocks), config.block_size),
        queue=WaitingQueue(*limits),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
