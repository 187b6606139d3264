"""Charts of bars: the capacity at the SLO, and how much of the slots was of use. Bars begin at zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria_bench.reporting.charts import MAX_NAME, PANEL, Chart
from noria_bench.reporting.drawing import draw, frame, legend
from noria_bench.reporting.figures import BY_KEY
from noria_bench.reporting.ideal import ideal_of_setting
from noria_bench.reporting.loaded import Family, Load, Source, is_closed
from noria_bench.reporting.palette import GRID, INK, SURFACE, Palette
from noria_bench.reporting.tables import capacity_text
from noria_bench.reporting.text import label_name, plain, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def capacity_bars(key: str, sources: Sequence[Source], palette: Palette) -> Chart | None:
    """None where nothing was swept."""
    found = [(source, one) for source in sources for one in source.result.capacities]
    if not found:
        return None
    largest = max((one.high or one.rate or 0.0 for _, one in found), default=0.0) or 1.0

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        frame(axes, "Capacity at the SLO", "requests/s", "")
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", linewidth=0.7)
        for row, (_, one) in enumerate(found):
            colour = palette.colour(one.label).stand_in
            rate = one.rate or 0.0
            axes.barh(row, rate, height=0.55, color=colour)
            end = rate
            if one.low is not None and one.high is not None and one.rate is not None:
                axes.errorbar(
                    rate, row, xerr=[[rate - one.low], [one.high - rate]], color=INK.stand_in, capsize=4, linewidth=1.3
                )
                end = max(rate, one.high)
            axes.annotate(
                capacity_text(one) if one.rate is not None else "none",
                (end, row),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
        names = [("" if len(sources) == 1 else f"{source.name}: ") + label_name(one.label) for source, one in found]
        axes.set_yticks(range(len(found)), [shortened(name, MAX_NAME) for name in names])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlim(0, 1.3 * largest)

    slos = "; ".join(dict.fromkeys(plain(one.slo, 100) for _, one in found))
    return Chart(
        "Capacity at the SLO",
        f"The highest rate that keeps {slos}. Whiskers: 95 % interval; of one repeat, its bracket. “At least”: no rate "
        "was tried that breaks it.",
        draw(key, (PANEL[0], 1.3 + 0.5 * len(found)), paint),
    )


@dataclass(frozen=True, slots=True)
class SlotBar:
    """Shares from 0 to 1. ideal: what the lengths allow a closed batch; None where unknown, 1 in flight."""

    name: str
    label: str
    measured: float
    ideal: float | None


def slot_bars(key: str, bars: Sequence[SlotBar], palette: Palette) -> Chart | None:
    if not bars:
        return None

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        frame(axes, "Useful share of the slots offered", "slot utilisation, %", "")
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", linewidth=0.7)
        for row, bar in enumerate(bars):
            axes.barh(row, 100, height=0.55, color=GRID.stand_in)
            axes.barh(row, 100 * bar.measured, height=0.55, color=palette.colour(bar.label).stand_in)
            # beside the bar, where nothing lies below it
            axes.annotate(
                f"{100 * bar.measured:.1f}%",
                (100, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
            if bar.ideal is not None:
                mark = {"color": INK.stand_in, "linewidth": 2, "solid_capstyle": "butt"}
                ends = [row - 0.38, row + 0.38]
                axes.plot([100 * bar.ideal] * 2, ends, color=SURFACE.stand_in, linewidth=5, solid_capstyle="butt")
                axes.plot([100 * bar.ideal] * 2, ends, **mark, label="ideal of the lengths")  # type: ignore[arg-type]
        axes.set_yticks(range(len(bars)), [shortened(bar.name, MAX_NAME) for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(0, 117)
        axes.set_xticks(range(0, 101, 25))
        legend(canvas, axes)

    return Chart(
        "Useful share of the slots offered",
        "Measured by the server: slots that held an unfinished sequence over slots offered. The mark is what the "
        "output lengths allow: E[length] / E[longest of a batch] for closed batches, 100 % in flight. Below saturation "
        "slots stay empty because nobody waits.",
        draw(key, (PANEL[0], 1.6 + 0.5 * len(bars)), paint),
    )


def bars_of(family: Family, load: Load) -> list[SlotBar]:
    bars = []
    for source, setting in family.at(load):
        measured = setting.mean(BY_KEY["slot_utilisation"])
        if measured is None:
            continue
        ideal = ideal_of_setting(source, setting) if is_closed(setting.runs[0]) else None
        share = 1.0 if not is_closed(setting.runs[0]) else None if ideal is None else ideal.closed_utilisation
        bars.append(SlotBar(family.name(source, setting), setting.label, measured, share))
    return bars
