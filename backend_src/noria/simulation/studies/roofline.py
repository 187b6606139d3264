"""How far sharing one read of the weights among sequences carries, before reading keys and values, or arithmetic, takes
over. By data sheet, no simulation."""

from __future__ import annotations

from collections.abc import Sequence

from noria.simulation.analytic import CHIPS, MODEL_SHAPES, AnalyticCostModel, DecodePoint, decode_points
from noria.simulation.studies.study import Mark, Panel, Series, Study

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 128, 512, 2048, 8192)


def roofline_study() -> Study:
    points = decode_points(AnalyticCostModel(CHIPS["H100"], MODEL_SHAPES["Llama-2-7B"]), BATCH_SIZES, CONTEXTS)
    alone = points[0]
    turns = ", ".join(f"{context:,} tokens: {_turn(points, context)}" for context in CONTEXTS)
    return Study(
        name="roofline",
        title="Decoding on a data sheet: how far one read of the weights is shared",
        setting="Llama-2-7B in fp16 (13.5 GB, multi-head attention) on an H100 (3.35 TB/s, 989 TFLOP/s), each step "
        "decoding one token of every sequence. A bound from below: kernels reach neither peak.",
        findings=(
            f"One sequence: {alone.step_s * 1e3:.1f} ms a step, {alone.tokens_per_s:.0f} tokens/s, "
            f"{1 - alone.arithmetic_share:.1%} of the arithmetic idle.",
            f"Batch size from which something other than the weights bounds a step, by context: {turns}.",
        ),
        points=points,
        panels=_panels(points),
    )


def _turn(points: Sequence[DecodePoint], context: int) -> str:
    first = next((point for point in points if point.context == context and point.bound != "weights"), None)
    return f"{first.batch_size} ({first.bound})" if first else "none"


def _panels(points: Sequence[DecodePoint]) -> tuple[Panel, ...]:
    panels = []
    for title, name, factor, y_label in (
        ("throughput (solid: fits into 80 GB)", "tokens_per_s", 1.0, "tokens/s"),
        ("a step", "step_s", 1e3, "ms"),
    ):
        series = []
        for colour, context in enumerate(CONTEXTS):
            own = [point for point in points if point.context == context]
            sizes, values = [p.batch_size for p in own], [factor * getattr(p, name) for p in own]
            num_fitting = sum(point.fits_memory for point in own)
            series.append(Series("", sizes, values, colour, is_dashed=True))
            series.append(Series(f"context {context:,}", sizes[:num_fitting], values[:num_fitting], colour, Mark.LINE))
        panels.append(Panel(title, "sequences in a step", y_label, tuple(series), x_scale="log2", y_scale="log"))
    return tuple(panels)
