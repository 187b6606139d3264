"""HTML from parts: whatever is not markup already is escaped. Knows nothing of reports."""

from __future__ import annotations

from html import escape
from itertools import count

from noria_bench.reporting.figures import NOTHING
from noria_bench.reporting.tables import Table

_VOID = {"meta", "input", "img", "br"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | bool | None) -> Markup:
    """Children that are no Markup are escaped; None are left out.

    attributes: a trailing _ is dropped and others become -, as in class_ and aria_label; True is a bare one, None and
    False are left out.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is True:
            parts.append(_name(name))
        elif value is not None and value is not False:
            parts.append(f'{_name(name)}="{escape(value)}"')
    head = f"<{' '.join(parts)}>"
    if tag in _VOID:
        return Markup(head)
    return Markup(head + join(*children) + f"</{tag}>")


def join(*children: str | None) -> Markup:
    known = (child for child in children if child is not None)
    return Markup("".join(child if isinstance(child, Markup) else escape(child, quote=False) for child in known))


def html_table(table: Table, numbers: count[int], has_title: bool = False) -> Markup:
    """In a box that scrolls, with the keyboard too. numbers: for ids. has_title: its caption stands above already."""
    caption = f"table-{next(numbers)}"
    columns = (element("th", cell, scope="col", class_=_kind(table, place)) for place, cell in enumerate(table.header))
    rows = (
        element("tr", *(_cell(table, place, cell) for place, cell in enumerate(row)), class_=_row_class(row))
        for row in table.rows
    )
    return element(
        "div",
        element(
            "table",
            element("caption", table.caption, id=caption, class_="quiet" if has_title else None),
            element("thead", element("tr", *columns)),
            element("tbody", *rows),
        ),
        class_="scroll",
        role="region",
        tabindex="0",
        aria_labelledby=caption,
    )


def _cell(table: Table, place: int, cell: str) -> Markup:
    if place < table.num_headers:
        return element("th", cell, scope="row")
    return element("td", cell, class_=_kind(table, place))


def _kind(table: Table, place: int) -> str | None:
    """Figures stand to the right, long texts wrap."""
    if place < table.num_headers:
        return None
    cells = [row[place] for row in table.rows]
    if table.has_text and place == len(table.header) - 1:
        return "text"
    is_figure = all(cell == NOTHING or cell[:1].isdigit() or cell.startswith("at least ") for cell in cells)
    return "figure" if is_figure else None


def _row_class(row: tuple[str, ...]) -> str | None:
    return "unfit" if {"invalid", "interrupted"} & set(row) else None


def _name(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")
