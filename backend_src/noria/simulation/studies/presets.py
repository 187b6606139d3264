"""The scheduling of other systems over one machine and one workload: throughput against latency as the rate grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noria.config import EngineConfig
from noria.presets import PRESETS
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.requests import SimRequest, make_requests
from noria.simulation.simulator import Simulator
from noria.simulation.studies.study import Panel, Series, Study, known
from noria_bench.arrivals import poisson
from noria_bench.lengths import LognormalLength, draw_lengths

RATES = (12.0, 24.0, 32.0, 40.0)
NUM_REQUESTS = 250
# what clients ask for; answers end earlier by themselves
MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PresetPoint:
    """rate: requests per second sent. tpot: per request; max_gap: each request's longest."""

    preset: str
    rate: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    max_gap_p99_s: float
    mean_batch: float
    num_preemptions: int


def presets_study() -> Study:
    points = [preset_point(preset, rate, workload(NUM_REQUESTS, rate)) for preset in PRESETS for rate in RATES]
    fastest = sorted((point for point in points if point.rate == RATES[-1]), key=lambda p: -p.output_tokens_per_s)
    return Study(
        name="presets",
        title="Other systems' scheduling over one machine",
        setting="Llama-2-7B in fp16 on an H100 by data sheet, whose KV cache is large for its size; "
        f"{NUM_REQUESTS} requests, Poisson, prompts log-normal around 1,024 tokens, outputs around 211 where clients "
        f"ask for {MAX_TOKENS:,} at most; 128 slots, steps of 2,048 tokens where the preset says nothing.",
        findings=(
            f"At {RATES[-1]:g} requests a second, output tokens/s and 95th percentile of the time to first token: "
            + ", ".join(f"{p.preset} {p.output_tokens_per_s:,.0f} and {p.ttft_p95_s:.1f} s" for p in fastest)
            + ".",
        ),
        points=points,
        panels=_panels(points),
    )


def workload(num_requests: int, rate: float) -> list[SimRequest]:
    return make_requests(
        poisson(num_requests, rate, seed=0),
        draw_lengths(LognormalLength(1024, 0.9, cap=2800), num_requests, seed=1),
        draw_lengths(LognormalLength(211, 0.8, cap=MAX_TOKENS), num_requests, seed=2),
        max_tokens=MAX_TOKENS,
    )


def preset_point(preset: str, rate: float, requests: Sequence[SimRequest]) -> PresetPoint:
    costs = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-2-7B"])
    settings: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, **PRESETS[preset]}
    config = EngineConfig(**settings)
    summary = Simulator(config, costs.num_kv_blocks(config.block_size), costs).run(requests).summary()
    return PresetPoint(
        preset=preset,
        rate=rate,
        output_tokens_per_s=known(summary.output_tokens_per_s),
        ttft_p50_s=known(summary.ttft_s).median,
        ttft_p95_s=known(summary.ttft_s).p95,
        tpot_p50_s=known(summary.tpot_s).median,
        tpot_p99_s=known(summary.tpot_s).p99,
        max_gap_p99_s=known(summary.max_gap_s).p99,
        mean_batch=summary.mean_batch or 0.0,
        num_preemptions=summary.num_preemptions,
    )


def _panels(points: Sequence[PresetPoint]) -> tuple[Panel, ...]:
    panels = []
    for title, name, factor, y_label, y_scale in (
        ("time to first token", "ttft_p95_s", 1.0, "95th percentile, s", "log"),
        ("time per output token", "tpot_p99_s", 1e3, "99th percentile, ms", "linear"),
    ):
        series = []
        for colour, preset in enumerate(PRESETS):
            own = [point for point in points if point.preset == preset]
            values = [factor * getattr(point, name) for point in own]
            series.append(Series(preset, [point.output_tokens_per_s for point in own], values, colour))
        panels.append(Panel(title, "output tokens/s", y_label, tuple(series), y_scale=y_scale))
    return tuple(panels)
