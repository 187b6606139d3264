"""Puts a scheduler together from the engine's configuration."""

from __future__ import annotations

from noria.config import EngineConfig
from noria.scheduling.admission import GuaranteedNoEvict, Immediate, MaxUtilization, WaitingServedRatio
from noria.scheduling.block_pool import BlockPool
from noria.scheduling.kv_cache_manager import KVCacheManager
from noria.scheduling.policies import ClosedBatch, InFlight, Policies
from noria.scheduling.prefill import EqualProgress, FirstComeChunks, Prefill, WholePrompts
from noria.scheduling.request_rules import RequestRules
from noria.scheduling.scheduler import Scheduler
from noria.scheduling.swap_space import SwapSpace
from noria.scheduling.waiting_order import ArrivalOrder, FairOrder
from noria.scheduling.waiting_queue import QueueLimit, WaitingQueue


def build_scheduler(config: EngineConfig, num_blocks: int, num_host_blocks: int = 0) -> Scheduler:
    """A scheduler in the mode and within the limits of `config`, over `num_blocks` free blocks."""
    policies = _closed_policies() if _is_closed(config) else _inflight_policies(config)
    cache = KVCacheManager(BlockPool(num_blocks), config.block_size, config.prefix_caching)
    has_swap = config.preemption == "swap" and not policies.mode.is_closed
    return Scheduler(
        policies=policies,
        rules=_rules(config, policies, cache.num_pool_tokens),
        cache=cache,
        swap=SwapSpace(num_host_blocks) if has_swap else None,
        # requests for a closed batch wait in Triton's queue, which has limits and priorities of its own
        queue=WaitingQueue(QueueLimit()) if policies.mode.is_closed else _queue(config),
        max_num_seqs=config.max_num_seqs,
    )


def _is_closed(config: EngineConfig) -> bool:
    return config.batching_mode != "inflight"


def _inflight_policies(config: EngineConfig) -> Policies:
    is_ratio = config.insertion == "waiting_served_ratio"
    is_optimistic = config.admission == "max_utilization"
    return Policies(
        mode=InFlight(),
        admission=MaxUtilization(config.max_preemptions) if is_optimistic else GuaranteedNoEvict(),
        insertion=(
            WaitingServedRatio(config.waiting_served_ratio, config.max_waiting_tokens) if is_ratio else Immediate()
        ),
        prefill=_prefill(config),
        has_separate_prefill=config.prefill_batching == "separate",
        admission_headroom=config.admission_headroom,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        max_preemptions=config.max_preemptions,
    )


def _closed_policies() -> Policies:
    """Members compute their whole prompts in the first step, and hold what they may need from then on."""
    return Policies(
        mode=ClosedBatch(),
        admission=GuaranteedNoEvict(),
        insertion=Immediate(),
        prefill=WholePrompts(),
        has_separate_prefill=False,
        admission_headroom=0.0,
        max_num_batched_tokens=None,
        max_prefill_tokens=None,
        max_batch_total_tokens=None,
        max_preemptions=0,
    )


def _prefill(config: EngineConfig) -> Prefill:
    if not config.chunked_prefill:
        return WholePrompts()
    return EqualProgress() if config.prefill_order == "equal_progress" else FirstComeChunks()


def _rules(config: EngineConfig, policies: Policies, num_pool_tokens: int) -> RequestRules:
    budgets = [
        budget for budget in (policies.max_num_batched_tokens, policies.max_prefill_tokens) if budget is not None
    ]
    return RequestRules(
        num_pool_tokens=num_pool_tokens,
        max_prefill_tokens=min(budgets) if budgets and not policies.prefill.is_chunked else None,
        max_batch_total_tokens=policies.max_batch_total_tokens,
        num_levels=config.priority_levels,
        default_level=config.default_priority_level,
        uses_levels=not policies.mode.is_closed,
        default_timeout_s=config.default_timeout_s,
        level_timeouts_s={
            level: entry.default_timeout_s
            for level, entry in config.priority_classes.items()
            if entry.default_timeout_s is not None
        },
    )


def _queue(config: EngineConfig) -> WaitingQueue:
    return WaitingQueue(
        limit=QueueLimit(config.max_queue_size, config.max_queue_tokens),
        num_levels=config.priority_levels,
        level_limits={
            level: QueueLimit(entry.max_queue_size, entry.max_queue_tokens)
            for level, entry in config.priority_classes.items()
        },
        ageing_s=config.priority_ageing_s,
        make_order=FairOrder if config.fair_share else ArrivalOrder,
    )
