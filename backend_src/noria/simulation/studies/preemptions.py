"""How often a request is driven out when the KV pool is too small, by how much of it admission leaves free.

The shape to keep is that of a healthy engine (inference-sim#963: 7 % of the requests, nearly all of them once), far
from the storm in which requests drive each other out again and again (sglang#26248).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from noria.config import EngineConfig
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.requests import SimRequest, make_requests
from noria.simulation.simulator import Simulator
from noria.simulation.studies.study import Mark, Panel, Series, Study, known
from noria_bench.arrivals import poisson
from noria_bench.lengths import LognormalLength, draw_lengths

NUM_REQUESTS = 400
RATE = 24.0
HEADROOMS = (0.0, 0.01, 0.05)
POOLS = {"mild pressure": 1400, "heavy pressure": 1000}


@dataclass(frozen=True, slots=True)
class PreemptionPoint:
    """num_blocks: of the pool. preempted_share: requests driven out at least once. times: how many requests were driven
    out 1, 2, ... times. lost_share: tokens computed twice, of all computed."""

    num_blocks: int
    admission_headroom: float
    preempted_share: float
    times: tuple[int, ...]
    lost_share: float
    ttft_p95_s: float
    max_gap_p99_s: float
    output_tokens_per_s: float


def preemptions_study() -> Study:
    requests = workload(NUM_REQUESTS)
    points = [preemption_point(blocks, headroom, requests) for blocks in POOLS.values() for headroom in HEADROOMS]
    usual = points[HEADROOMS.index(0.01)]
    return Study(
        name="preemptions",
        title="How often requests are preempted",
        setting="Llama-3.1-8B in fp16 on an H100 by data sheet, with a pool of "
        f"{' or '.join(map(str, POOLS.values()))} blocks of 16 tokens; {NUM_REQUESTS} requests, Poisson, {RATE:g} a "
        "second, prompts log-normal around 512 tokens, outputs around 256; max_utilization, recompute.",
        findings=(
            f"Under mild pressure with the default headroom of 1 %, {usual.preempted_share:.1%} of the requests are "
            f"preempted, {usual.times[0]} once and {sum(usual.times[1:])} more often; {usual.lost_share:.1%} of the "
            "tokens are computed twice.",
            f"Nobody is preempted more than {max(len(point.times) for point in points)} times, even without headroom.",
        ),
        points=points,
        panels=tuple(_panel(name, [p for p in points if p.num_blocks == size]) for name, size in POOLS.items()),
    )


def workload(num_requests: int) -> list[SimRequest]:
    return make_requests(
        poisson(num_requests, RATE, seed=0),
        draw_lengths(LognormalLength(512, 0.8, cap=4096), num_requests, seed=1),
        draw_lengths(LognormalLength(256, 0.8, cap=2048), num_requests, seed=2),
    )


def preemption_point(num_blocks: int, headroom: float, requests: Sequence[SimRequest]) -> PreemptionPoint:
    costs = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-3.1-8B"])
    config = EngineConfig(
        max_num_seqs=128, max_num_batched_tokens=2048, prefix_caching=False, admission_headroom=headroom
    )
    result = Simulator(config, num_blocks, costs).run(requests)
    counts = Counter(record.num_preemptions for record in result.records)
    summary = result.summary()
    return PreemptionPoint(
        num_blocks=num_blocks,
        admission_headroom=headroom,
        preempted_share=1 - counts[0] / len(requests),
        times=tuple(counts[number] for number in range(1, max(counts) + 1)),
        lost_share=summary.num_recomputed_tokens / result.counters.computed_tokens,
        ttft_p95_s=known(summary.ttft_s).p95,
        max_gap_p99_s=known(summary.max_gap_s).p99,
        output_tokens_per_s=known(summary.output_tokens_per_s),
    )


def _panel(title: str, points: Sequence[PreemptionPoint]) -> Panel:
    series = []
    for colour, point in enumerate(points):
        shares = [100 * count / NUM_REQUESTS for count in (*point.times, 0, 0, 0)[:3]]
        names = ("once", "twice", "three times")
        series.append(Series(f"headroom {point.admission_headroom:.0%}", names, shares, colour, Mark.BARS))
    return Panel(f"{title}: {points[0].num_blocks:,} blocks", "preempted", "% of requests", tuple(series))
