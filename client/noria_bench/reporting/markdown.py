"""A report as Markdown: a column a label, as in a README. Needs no matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence

from noria_bench.reporting import tables
from noria_bench.reporting.comparison import comparisons_of
from noria_bench.reporting.loaded import Source, families_of
from noria_bench.reporting.problems import problems_of
from noria_bench.reporting.tables import Table
from noria_bench.reporting.text import plain

# what begins something in Markdown, or in the HTML that Markdown lets through
_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def markdown_report(sources: Sequence[Source], title: str) -> str:
    """Every load side by side, capacities, ratios, and what is wrong with the runs."""
    parts = [f"# {escaped(title)}"]
    problems = problems_of(sources)
    if problems:
        lines = (f"- {escaped(f'{one.kind}: {one.runs}. {one.text}')}" for one in problems)
        parts += ["## Read this first", "\n".join(lines)]
    for family in families_of(sources):
        for load in family.loads:
            pairs = family.at(load)
            names = [family.name(*pair) for pair in pairs]
            heading = f"{', '.join(source.name for source in family.sources)}: {load}"
            table = tables.side_by_side([setting for _, setting in pairs], names, heading)
            parts += [f"## {escaped(heading)}", markdown_table(table)]
    capacities = tables.capacities(sources)
    if capacities is not None:
        parts += [f"## {escaped(capacities.caption)}", markdown_table(capacities)]
    for comparison in comparisons_of(sources):
        table = tables.comparison_rows(comparison)
        parts += [f"## {escaped(table.caption)}", *(escaped(note) for note in comparison.notes), markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    return "\n".join(
        "| " + " | ".join(cell if line[0] == "---" else escaped(cell) for cell in line) + " |" for line in lines
    )


def escaped(text: str) -> str:
    """As itself, on one line, inside a cell or outside."""
    safe = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", safe)
