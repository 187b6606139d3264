"""How much faster other labels are than the first, beside what the output lengths predict, workload by workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria_bench.reporting.comparison import Side, compare_sides
from noria_bench.reporting.figures import BY_KEY, NOTHING, number
from noria_bench.reporting.ideal import Ideal, ideal_of_setting
from noria_bench.reporting.intervals import Estimate
from noria_bench.reporting.loaded import Family, Load, Source, is_closed
from noria_bench.reporting.tables import Table, interval_text
from noria_bench.reporting.text import label_name

_FIGURES = (BY_KEY["output_tokens_per_s"], BY_KEY["slot_utilisation"])


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """One label against a closed one under one workload. cv: of the output lengths as the workload states it.

    is_closed: the label is a closed one, too. tokens: ratio of output tokens/s. slots: of slot utilisation. ideal:
    predicted for in-flight batching.
    """

    source: str
    base: str
    label: str
    load: Load
    cv: float | None
    is_closed: bool
    tokens: Estimate
    slots: float | None
    ideal: Ideal

    @property
    def x(self) -> float:
        return self.ideal.cv if self.cv is None else self.cv

    @property
    def predicted(self) -> float:
        return 1.0 if self.is_closed else self.ideal.ratio


def ratio_points(sources: Sequence[Source]) -> list[RatioPoint]:
    """Of results whose first closed label has records and slots.

    Under the highest concurrency, or with all requests at once: at a rate that all labels keep up with, all yield the
    same.
    """
    points = []
    for source in sources:
        loads = [load for load in Family((source,)).loads if not load.rate]
        if not loads:
            continue
        load = loads[-1]
        settings = [setting for setting in source.settings if setting.load == load]
        base = next((setting for setting in settings if is_closed(setting.runs[0])), None)
        ideal = None if base is None else ideal_of_setting(source, base)
        if base is None or ideal is None:
            continue
        for setting in settings:
            if setting is base:
                continue
            sides = Side(base.label, source, base), Side(setting.label, source, setting)
            rows = {row.figure.key: row for row in compare_sides(*sides, figures=_FIGURES).rows}
            tokens, slots = rows.get("output_tokens_per_s"), rows.get("slot_utilisation")
            if tokens is not None and tokens.ratio is not None:
                slot_ratio = None if slots is None or slots.ratio is None else slots.ratio.value
                names = (source.name, base.label, setting.label)
                is_closed_too = is_closed(setting.runs[0])
                point = RatioPoint(*names, load, source.output_cv, is_closed_too, tokens.ratio, slot_ratio, ideal)
                points.append(point)
    return points


def ratio_table(points: Sequence[RatioPoint]) -> Table | None:
    if not points:
        return None
    header = (
        *("result", "label", "slots", "CV of the output lengths", "tokens/s, times base", "95% interval"),
        *("slot utilisation, times base", "predicted", "95% of the orders", "measured over predicted"),
    )
    rows = [
        (
            point.source,
            f"{label_name(point.label)} over {label_name(point.base)}",
            str(point.ideal.num_slots),
            number(point.x),
            number(point.tokens.value),
            interval_text(point.tokens),
            NOTHING if point.slots is None else number(point.slots),
            number(point.predicted),
            NOTHING if point.is_closed else f"{number(point.ideal.low)} to {number(point.ideal.high)}",
            number(point.tokens.value / point.predicted),
        )
        for point in sorted(points, key=lambda point: point.x)
    ]
    return Table("Measured ratios beside what the lengths predict", header, tuple(rows), num_headers=2)
