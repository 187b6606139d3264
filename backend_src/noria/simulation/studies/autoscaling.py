"""When to start replicas: on a sign of load, or once the queue has grown and the latency with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from noria.config import EngineConfig
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.autoscaling import Autoscaling
from noria.simulation.fleet import FleetResult, LeastOutstandingTokens, ReplicaLife, run_fleet
from noria.simulation.replica import Replica
from noria.simulation.requests import SimRequest, make_requests
from noria.simulation.studies.study import Mark, Panel, Series, Study, known
from noria_bench.lengths import LognormalLength, draw_lengths
from noria_bench.slo import Objectives

# seconds, and requests per second then: on straight lines between them
RATE_TIMES_S = (0.0, 60.0, 240.0, 360.0, 420.0, 480.0)
RATES = (0.7, 0.7, 6.0, 6.0, 0.7, 0.7)
MAX_REPLICAS = 4
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.15)
BUCKET_S = 15.0


_LATE = Autoscaling(MAX_REPLICAS, max_waiting=32, interval_s=10.0, load_time_s=60.0, idle_s=60.0)
# by name: replicas from the beginning, and the rule
RULES: Mapping[str, tuple[int, Autoscaling | None]] = {
    "1 replica": (1, None),
    "late: 32 wait": (1, _LATE),
    "late, loads in 10 s": (1, replace(_LATE, load_time_s=10.0)),
    "early: 2,400 running tokens": (1, replace(_LATE, max_waiting=None, max_running_tokens=2400)),
    "4 replicas": (MAX_REPLICAS, None),
}


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """good_share: of the requests, that met the objectives. replica_seconds: paid for, loading included."""

    rule: str
    good_share: float
    replica_seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p95_s: float


def autoscaling_study() -> Study:
    requests = workload(RATE_TIMES_S, RATES)
    results = {name: simulate(name, requests) for name in RULES}
    points = [scaling_point(name, result) for name, result in results.items()]
    late, early = (next(p for p in points if p.rule.startswith(word)) for word in ("late:", "early:"))
    return Study(
        name="autoscaling",
        title="Scaling early, and after the latency has exploded",
        setting="Replicas of Llama-3.1-8B in fp16 on an L4 by data sheet, 16 slots each, behind a router by "
        f"outstanding tokens; {len(requests)} requests, Poisson, {RATES[0]:g} a second growing to {max(RATES):g} in "
        "three minutes; a rule looks every 10 s, a model loads in 60 s. Good: first token within "
        f"{OBJECTIVES.ttft_s:g} s, {OBJECTIVES.tpot_s:g} s per token.",
        findings=(
            f"Triggered by the queue, {1 - late.good_share:.0%} of the requests miss the objectives and the 99th "
            f"percentile of the time to first token is {late.ttft_p99_s:.0f} s; triggered by the running tokens, "
            f"{1 - early.good_share:.1%} and {early.ttft_p99_s:.1f} s, "
            f"for {early.replica_seconds / late.replica_seconds - 1:+.0%} replica-seconds.",
        ),
        points=points,
        panels=_panels(results),
        num_columns=1,
    )


def workload(times_s: Sequence[float], rates: Sequence[float]) -> list[SimRequest]:
    """Poisson arrivals at a rate that changes: thinned ones of the highest (Lewis and Shedler 1979)."""
    rng = np.random.default_rng(0)
    highest = max(rates)
    candidates = np.cumsum(rng.exponential(1 / highest, int(2 * highest * times_s[-1])))
    candidates = candidates[candidates < times_s[-1]]
    is_kept = rng.random(len(candidates)) * highest < np.interp(candidates, times_s, rates)
    arrivals_s = [float(time_s) for time_s in candidates[is_kept]]
    num = len(arrivals_s)
    return make_requests(
        arrivals_s,
        draw_lengths(LognormalLength(256, 0.8, cap=2048), num, seed=1),
        draw_lengths(LognormalLength(80, 0.8, cap=512), num, seed=2),
    )


def simulate(rule: str, requests: Sequence[SimRequest]) -> FleetResult:
    costs = AnalyticCostModel(CHIPS["L4"], MODEL_SHAPES["Llama-3.1-8B"])
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512, prefix_caching=False)
    num_blocks = costs.num_kv_blocks(config.block_size)
    num_replicas, autoscaling = RULES[rule]
    return run_fleet(
        requests,
        lambda number: Replica(config, num_blocks, costs, number=number),
        num_replicas,
        LeastOutstandingTokens(),
        autoscaling,
    )


def scaling_point(rule: str, result: FleetResult) -> ScalingPoint:
    summary = result.simulation.summary(OBJECTIVES)
    return ScalingPoint(
        rule=rule,
        good_share=known(summary.good_share),
        replica_seconds=result.replica_seconds,
        ttft_p50_s=known(summary.ttft_s).median,
        ttft_p99_s=known(summary.ttft_s).p99,
        tpot_p95_s=known(summary.tpot_s).p95,
    )


def _panels(results: Mapping[str, FleetResult]) -> tuple[Panel, ...]:
    rate = Series("", RATE_TIMES_S, RATES, colour=6, is_dashed=True)
    latencies = [Series(name, *_latency(result), colour) for colour, (name, result) in enumerate(results.items())]
    replicas = [
        Series(name, *_num_replicas(result.lives), colour, Mark.STEPS)
        for colour, (name, result) in enumerate(results.items())
    ]
    x_label = "seconds"
    return (
        Panel("load", x_label, "requests/s", (rate,)),
        Panel("time to first token, by arrival", x_label, "95th percentile, s", tuple(latencies), y_scale="log"),
        Panel("replicas paid for", x_label, "replicas", tuple(replicas)),
    )


def _latency(result: FleetResult) -> tuple[list[float], list[float]]:
    """The middle of each span of BUCKET_S, and the 95th percentile of its arrivals' time to first token."""
    buckets: dict[int, list[float]] = {}
    for record in result.simulation.records:
        if record.ttft_s is not None:
            buckets.setdefault(int(record.sent_s / BUCKET_S), []).append(record.ttft_s)
    places = sorted(buckets)
    return [(place + 0.5) * BUCKET_S for place in places], [float(np.percentile(buckets[p], 95)) for p in places]


def _num_replicas(lives: Sequence[ReplicaLife]) -> tuple[list[float], list[int]]:
    """When it changes, and what it is from then on."""
    changes = sorted({time for life in lives for time in (life.started_s, life.stopped_s)})
    return changes, [sum(life.started_s <= time < life.stopped_s for life in lives) for time in changes]
