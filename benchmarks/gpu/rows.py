"""What a stage says: one row for each figure or check, as JSON, and the words of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """value: None where there is none, because it failed (`error`) or was left out (`note` says why).

    target: the least value that the project aims at. is_exact: of a check, whether it held; None for a measure.
    details: figures behind the value, for the JSON alone.
    """

    stage: str
    name: str
    value: float | None = None
    unit: str = ""
    target: float | None = None
    is_exact: bool | None = None
    note: str = ""
    error: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.error:
            return "failed"
        if self.is_exact is not None:
            return "exact" if self.is_exact else "NOT EXACT"
        if self.value is None:
            return "left out"
        if self.target is None:
            return ""
        return "reached" if self.value >= self.target else "missed"

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def table(rows: list[Row]) -> str:
    """Markdown, one line a row."""
    lines = ["| stage | what | value | target | verdict | note |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        value = "" if row.value is None else f"{number(row.value)} {row.unit}".strip()
        target = "" if row.target is None else f">= {number(row.target)} {row.unit}".strip()
        cells = [row.stage, row.name, value, target, row.verdict, row.error or row.note]
        # what an error says must not end a cell
        words = (" ".join(cell.split()).replace("|", "\\|")[:300] for cell in cells)
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
