"""Runs side by side, for rich to print and for a README. Needs neither their requests nor matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table as RichTable

from noria_bench.reporting import tables
from noria_bench.reporting.loaded import Setting, settings_of
from noria_bench.reporting.markdown import markdown_table
from noria_bench.reporting.text import label_name
from noria_bench.results import Run

CAPTION = "Batching modes, same workload"


def comparison_table(runs: Sequence[Run]) -> RichTable:
    """A column for each label, and for each load where there are several; repeats as their mean."""
    table = _side_by_side(runs, is_compact=False)
    rich_table = RichTable(title=table.caption)
    rich_table.add_column("")
    for name in table.header[1:]:
        rich_table.add_column(escape(name), justify="right")
    messages = {error for run in runs for error in run.summary.all.errors}
    num_errors = len(messages)
    for place, row in enumerate(table.rows):
        style = "red" if place >= len(table.rows) - num_errors else ""
        rich_table.add_row(*(escape(cell) for cell in row), style=style)
    return rich_table


def comparison_markdown(runs: Sequence[Run]) -> str:
    return markdown_table(_side_by_side(runs, is_compact=True))


def _side_by_side(runs: Sequence[Run], is_compact: bool) -> tables.Table:
    settings = settings_of(runs)
    return tables.side_by_side(settings, _names(settings), CAPTION, is_compact)


def _names(settings: Sequence[Setting]) -> list[str]:
    if len({setting.load for setting in settings}) == 1:
        return [label_name(setting.label) for setting in settings]
    return [f"{label_name(setting.label)}, {setting.load}" for setting in settings]
