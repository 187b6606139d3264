"""Reserving what a request may come to (guaranteed_no_evict), or letting in what fits now and evicting later
(max_utilization), as the KV pool shrinks.

The question of TensorRT-LLM#16827, where the second lost 40 % of the output. What loses it, prompts let in for which
there is no room and evicted requests let in again at once, this scheduler does not do; what is left shows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria.config import EngineConfig
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.requests import SimRequest, make_requests
from noria.simulation.simulator import Simulator
from noria.simulation.studies.study import Panel, Series, Study, known
from noria_bench.arrivals import all_at_once
from noria_bench.lengths import UniformLength, draw_lengths

CONCURRENCY = 32
NUM_REQUESTS = 80
MEAN_PROMPT, MEAN_OUTPUT = 2048, 1024
# of the blocks that CONCURRENCY mean requests fill
POOL_SHARES = (0.2, 0.4, 0.7, 1.25)
TIGHT_SHARE = 0.4
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "guaranteed_no_evict": {"admission": "guaranteed_no_evict", "admission_headroom": 0.0},
    "max_utilization, recompute": {},
    "max_utilization, swap": {"preemption": "swap"},
    "max_utilization, no headroom": {"admission_headroom": 0.0},
}
RESERVING, RECOMPUTING, SWAPPING, BARE = POLICIES
SWEPT = (RESERVING, RECOMPUTING, SWAPPING)
# of TensorRT-LLM#16827: requests, their prompt and output, and how many its pool holds
ISSUE_NUM_REQUESTS, ISSUE_PROMPT, ISSUE_OUTPUT, ISSUE_NUM_FITTING = 128, 16384, 512, 10.7


@dataclass(frozen=True, slots=True)
class EvictionPoint:
    """pool_share: of the blocks that the concurrent requests would fill. num_recomputed_tokens: computed twice."""

    workload: str
    policy: str
    pool_share: float
    output_tokens_per_s: float
    ttft_p50_s: float
    tpot_p99_s: float
    max_gap_p99_s: float
    num_preemptions: int
    num_recomputed_tokens: int


def eviction_study() -> Study:
    requests = mixed_workload(NUM_REQUESTS)
    points = [eviction_point("mixed", policy, share, requests) for policy in SWEPT for share in POOL_SHARES]
    issue = [
        eviction_point("as the issue", policy, ISSUE_NUM_FITTING / CONCURRENCY, issue_workload(ISSUE_NUM_REQUESTS))
        for policy in (RESERVING, BARE, RECOMPUTING)
    ]
    reserved, optimistic = [point for point in points if point.pool_share == TIGHT_SHARE][:2]
    return Study(
        name="eviction",
        title="Reserving or evicting, as the KV pool shrinks",
        setting=f"Llama-3.1-8B in fp16 on an H100 by data sheet, {CONCURRENCY} requests under way at a time, no prefix "
        f"cache. Mixed: {NUM_REQUESTS} requests, prompts uniform in {MEAN_PROMPT} ±50 % tokens, outputs in "
        f"{MEAN_OUTPUT} ±50 %. As TensorRT-LLM#16827: {ISSUE_NUM_REQUESTS} requests of {ISSUE_PROMPT} and "
        f"{ISSUE_OUTPUT} tokens, a pool for {ISSUE_NUM_FITTING} of them.",
        findings=(
            f"Mixed, with {TIGHT_SHARE:.0%} of the blocks: {_compare(optimistic, reserved)}.",
            "With blocks for all, the policies are the same.",
            f"As in the issue, without headroom: {_compare(issue[1], issue[0])}.",
            f"As in the issue, with the default headroom of 1 % of the blocks: {_compare(issue[2], issue[0])}.",
        ),
        points=[*points, *issue],
        panels=_panels(points),
    )


def mixed_workload(num_requests: int) -> list[SimRequest]:
    return make_requests(
        all_at_once(num_requests),
        draw_lengths(UniformLength(MEAN_PROMPT // 2, MEAN_PROMPT * 3 // 2), num_requests, seed=1),
        draw_lengths(UniformLength(MEAN_OUTPUT // 2, MEAN_OUTPUT * 3 // 2), num_requests, seed=2),
    )


def issue_workload(num_requests: int) -> list[SimRequest]:
    return [SimRequest(0.0, ISSUE_PROMPT, ISSUE_OUTPUT) for _ in range(num_requests)]


def eviction_point(workload: str, policy: str, pool_share: float, requests: Sequence[SimRequest]) -> EvictionPoint:
    """workload: its name. policy: of POLICIES."""
    costs = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-3.1-8B"])
    config = EngineConfig(
        max_num_seqs=CONCURRENCY, max_num_batched_tokens=8192, prefix_caching=False, **POLICIES[policy]
    )
    mean_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in requests) / len(requests)
    num_blocks = int(pool_share * CONCURRENCY * mean_tokens / config.block_size)
    simulator = Simulator(config, num_blocks, costs, num_host_blocks=num_blocks * CONCURRENCY)
    summary = simulator.run(requests, concurrency=CONCURRENCY).summary()
    return EvictionPoint(
        workload=workload,
        policy=policy,
        pool_share=pool_share,
        output_tokens_per_s=known(summary.output_tokens_per_s),
        ttft_p50_s=known(summary.ttft_s).median,
        tpot_p99_s=known(summary.tpot_s).p99,
        max_gap_p99_s=known(summary.max_gap_s).p99,
        num_preemptions=summary.num_preemptions,
        num_recomputed_tokens=summary.num_recomputed_tokens,
    )


def _compare(optimistic: EvictionPoint, reserved: EvictionPoint) -> str:
    if not optimistic.num_preemptions:
        return "max_utilization preempts nobody"
    return (
        f"max_utilization against guaranteed_no_evict gives output tokens/s "
        f"{optimistic.output_tokens_per_s / reserved.output_tokens_per_s - 1:+.0%}, a median time to first token "
        f"{optimistic.ttft_p50_s / reserved.ttft_p50_s - 1:+.0%}, a 99th percentile of the time per token "
        f"{optimistic.tpot_p99_s / reserved.tpot_p99_s:.1f} times and of the longest gap "
        f"{optimistic.max_gap_p99_s / reserved.max_gap_p99_s:.0f} times as long"
    )


def _panels(points: Sequence[EvictionPoint]) -> tuple[Panel, ...]:
    panels = []
    for title, name, factor, y_label, y_scale in (
        ("throughput", "output_tokens_per_s", 1.0, "output tokens/s", "linear"),
        ("time to first token", "ttft_p50_s", 1.0, "median, s", "linear"),
        ("time per output token", "tpot_p99_s", 1e3, "99th percentile, ms", "linear"),
        ("longest gap of a request", "max_gap_p99_s", 1.0, "99th percentile, s", "log"),
    ):
        series = []
        for colour, policy in enumerate(SWEPT):
            own = [point for point in points if point.policy == policy]
            values = [factor * getattr(point, name) for point in own]
            series.append(Series(policy, [100 * point.pool_share for point in own], values, colour))
        panels.append(Panel(title, "KV pool, % of what the requests fill", y_label, tuple(series), y_scale=y_scale))
    return tuple(panels)
