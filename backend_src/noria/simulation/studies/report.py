"""A study in words and numbers: as Markdown, and as JSON can hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from noria.simulation.studies.study import Study


def to_markdown(study: Study, picture: str) -> str:
    """A section. picture: the path that its image is linked by."""
    names = [entry.name for entry in fields(study.points[0])]
    rows = ([_cell(getattr(point, name)) for name in names] for point in study.points)
    return "\n".join(
        [
            f"## {study.title}",
            "",
            study.setting,
            "",
            *(f"- {finding}" for finding in study.findings),
            "",
            f"![{study.title}]({picture})",
            "",
            *_table(names, rows),
            "",
        ]
    )


def to_json(study: Study) -> dict[str, Any]:
    return {
        "title": study.title,
        "setting": study.setting,
        "findings": list(study.findings),
        "points": [asdict(point) for point in study.points],
    }


def _table(names: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [_line(names), _line(["---"] * len(names)), *map(_line, rows)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, tuple):
        return ", ".join(map(_cell, value))
    return str(value)
