"""What the chunk budget trades: time to first token against the gaps in the outputs of others (Sarathi-Serve, OSDI'24).

Prompts may be computed in chunks or whole, beside decodes (mixed) or in steps of their own (separate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria.config import EngineConfig
from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel
from noria.simulation.requests import SimRequest, make_requests
from noria.simulation.simulator import Simulator
from noria.simulation.studies.study import Mark, Panel, Series, Study, known
from noria_bench.arrivals import poisson
from noria_bench.lengths import LognormalLength, draw_lengths

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
# a step holds any prompt of the workload
WHOLE_BUDGET = 16384
NUM_REQUESTS = 400
RATE = 22.0
MAX_NUM_SEQS = 128


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """budget: max_num_batched_tokens. tpot: per request; icl: gaps of all requests in one pool; max_gap: each request's
    longest."""

    prompts: str
    prefill_batching: str
    budget: int
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p99_s: float
    icl_p99_s: float
    max_gap_p99_s: float
    output_tokens_per_s: float


def sarathi_study() -> Study:
    points = budget_points(BUDGETS, workload(NUM_REQUESTS))
    mixed = {point.budget: point for point in points if _kind(point) == "chunks, mixed"}
    separate = next(point for point in points if _kind(point) == "chunks, separate" and point.budget == 512)
    whole = {point.prefill_batching: point for point in points if point.prompts == "whole"}
    ablation = ", ".join(
        f"{name} {point.ttft_p50_s * 1e3:.0f} / {point.icl_p99_s * 1e3:.0f}"
        for name, point in (
            ("neither", whole["separate"]),
            ("mixed only", whole["mixed"]),
            ("chunks only (512)", separate),
            ("both (512)", mixed[512]),
        )
    )
    return Study(
        name="sarathi",
        title="The chunk budget: time to first token against gaps between tokens",
        setting=f"Llama-3.1-8B in fp16 on an H100 by data sheet; {NUM_REQUESTS} requests, Poisson, {RATE:g} a second, "
        f"prompts log-normal around 2,048 tokens, outputs around 128; {MAX_NUM_SEQS} slots.",
        findings=(
            "From a budget of 256 to 8,192 tokens the 99th percentile of the gaps grows from "
            f"{mixed[256].icl_p99_s * 1e3:.1f} to {mixed[8192].icl_p99_s * 1e3:.0f} ms; the median time to first token "
            f"falls from {mixed[256].ttft_p50_s * 1e3:.0f} to {mixed[512].ttft_p50_s * 1e3:.0f} ms at 512, where "
            "arithmetic bounds a step, and no further.",
            f"Median time to first token / 99th percentile of the gaps, ms: {ablation}.",
        ),
        points=points,
        panels=_panels(points),
    )


def workload(num_requests: int) -> list[SimRequest]:
    return make_requests(
        poisson(num_requests, RATE, seed=0),
        draw_lengths(LognormalLength(2048, 1.0, cap=8192), num_requests, seed=1),
        draw_lengths(LognormalLength(128, 0.8, cap=1024), num_requests, seed=2),
    )


def budget_points(budgets: Sequence[int], requests: Sequence[SimRequest]) -> list[BudgetPoint]:
    """Chunks of each budget and whole prompts, mixed and separate."""
    return [
        _point(batching, budget, is_chunked, requests)
        for batching in ("mixed", "separate")
        for budget, is_chunked in (*((budget, True) for budget in budgets), (WHOLE_BUDGET, False))
    ]


def _point(batching: str, budget: int, is_chunked: bool, requests: Sequence[SimRequest]) -> BudgetPoint:
    costs = AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-3.1-8B"])
    config = EngineConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        chunked_prefill=is_chunked,
        prefill_batching=batching,
        prefix_caching=False,
    )
    summary = Simulator(config, costs.num_kv_blocks(config.block_size), costs).run(requests).summary()
    return BudgetPoint(
        prompts="chunks" if is_chunked else "whole",
        prefill_batching=batching,
        budget=budget,
        ttft_p50_s=known(summary.ttft_s).median,
        ttft_p95_s=known(summary.ttft_s).p95,
        tpot_p99_s=known(summary.tpot_s).p99,
        icl_p99_s=known(summary.icl_s).p99,
        max_gap_p99_s=known(summary.max_gap_s).p99,
        output_tokens_per_s=known(summary.output_tokens_per_s),
    )


def _kind(point: BudgetPoint) -> str:
    return f"{point.prompts}, {point.prefill_batching}"


def _panels(points: Sequence[BudgetPoint]) -> tuple[Panel, ...]:
    panels = []
    for title, name, y_label in (
        ("time to first token", "ttft_p50_s", "median, ms"),
        ("gap between tokens, all requests", "icl_p99_s", "99th percentile, ms"),
    ):
        series = []
        for colour, kind in enumerate(dict.fromkeys(_kind(point) for point in points)):
            own = [point for point in points if _kind(point) == kind]
            is_level = len(own) == 1
            series.append(
                Series(
                    kind if not is_level else f"whole prompts, {own[0].prefill_batching}",
                    [point.budget for point in own],
                    [1e3 * getattr(point, name) for point in own],
                    colour,
                    Mark.LEVEL if is_level else Mark.LINE,
                    is_dashed=is_level,
                )
            )
        panels.append(
            Panel(
                title,
                "tokens in a step at most, the chunk budget",
                y_label,
                tuple(series),
                x_scale="log2",
                y_scale="log",
            )
        )
    return tuple(panels)
