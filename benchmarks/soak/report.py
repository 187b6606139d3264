"""A soak's figures as Markdown tables. Knows no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from soak.running import Counts
from soak.samples import BLOCKS, HELD, Sample, growth
from soak.steps import step_times

# of the time that the load took
MOMENTS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
MAX_GROUPS = 8


def condensed(samples: Sequence[Sample]) -> list[Sample]:
    """Those nearest to MOMENTS, none twice."""
    end_s = samples[-1].time_s
    chosen = [min(samples, key=lambda sample: abs(sample.time_s - share * end_s)) for share in MOMENTS]
    return list({id(sample): sample for sample in chosen}.values())


def held_table(samples: Sequence[Sample], idle: Sample | None) -> str:
    """A line for each figure, a column for each of a few moments and for rest, and how it grew."""
    moments = condensed(samples)
    heads = [f"{sample.time_s:.0f} s" for sample in moments]
    if idle is not None:
        moments, heads = [*moments, idle], [*heads, "at rest"]
    lines = [_line(["", *heads, "growth per 1,000 finished"]), "|---|" + "---:|" * (len(heads) + 1)]
    for name, measure in HELD.items():
        grown = growth(samples, measure)
        cell = f"{grown.per_1000:+.2f} ± {grown.standard_error:.2f}" if grown else ""
        lines.append(_line([name, *(_cell(measure(sample)) for sample in moments), cell]))
    for name, measure in BLOCKS.items():
        lines.append(_line([name, *(_cell(measure(sample)) for sample in moments), ""]))
    for field in fields(Counts):
        values = (getattr(sample.counts, field.name) for sample in moments)
        lines.append(_line([field.name.replace("_", " "), *map(_cell, values), ""]))
    return "\n".join(lines)


def steps_table(times_ms: Mapping[int, Sequence[float]]) -> str:
    """times_ms: of the steps by their numbers of sequences, of which those with the most steps are shown."""
    most = sorted(sorted(times_ms, key=lambda num: -len(times_ms[num]))[:MAX_GROUPS])
    heads = ["sequences decoding", "steps", "median, ms", "p95", "p99", "max", "p99 / median"]
    lines = [_line(heads), "|" + "---:|" * len(heads)]
    for num in most:
        took = step_times(times_ms[num])
        cells = [f"{took.median_ms:.1f}", f"{took.p95_ms:.1f}", f"{took.p99_ms:.1f}", f"{took.max_ms:.1f}"]
        lines.append(_line([f"{num}", f"{took.num_steps}", *cells, f"{took.p99_over_median:.2f}"]))
    return "\n".join(lines)


def grown(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Each figure's growth, where there is one."""
    found = {name: growth(samples, measure) for name, measure in HELD.items()}
    return {name: vars(one) for name, one in found.items() if one is not None}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: float | None) -> str:
    if value is None:
        return "not told"
    return f"{value:.1f}" if isinstance(value, float) else f"{value}"
