"""One picture, drawn by matplotlib, as SVG to be put into a page: text as text, colours as CSS variables.

matplotlib is loaded when something is drawn. Knows nothing of what is drawn.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from noria_bench.errors import BenchError
from noria_bench.reporting import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    # a label is no formula
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 10.5,
    "legend.fontsize": 9,
    "path.simplify": True,
    "text.color": palette.INK.stand_in,
    "axes.edgecolor": palette.MUTED.stand_in,
    "axes.labelcolor": palette.INK.stand_in,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": palette.MUTED.stand_in,
    "ytick.color": palette.MUTED.stand_in,
    "xtick.labelcolor": palette.INK.stand_in,
    "ytick.labelcolor": palette.INK.stand_in,
    "grid.color": palette.GRID.stand_in,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
}
_VARIABLES = {colour.stand_in: f"var(--{colour.name})" for colour in palette.ALL}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
# as a property of its own, or, from older versions, at the end of the shorthand
_FONT = re.compile(r"(font-family: |font: (?:[\w.]+ )*[\d.]+px )[^;]*")
_REFERENCE = re.compile(r"url\(#([^)]+)\)|^#(.+)$")


def check_can_draw() -> None:
    """Raises BenchError where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise BenchError(
            "a page with charts needs matplotlib: pip install 'noria[plots]'; --markdown and --csv do without"
        )


def draw(key: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    """An <svg> element. key: a word, unique in the page, that its ids begin with. inches: width and height."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # "svg.hashsalt": equal charts have equal ids
    with rc_context({**_RC, "svg.hashsalt": key}), warnings.catch_warnings():
        # the browser has fonts for what matplotlib's lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=inches, layout="constrained")
        paint(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _for_page(file.getvalue(), key)


def frame(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.7)
    axes.set_axisbelow(True)


def scale_for(axes: Axes, which: str, values: list[float], max_spread: float = 30.0) -> None:
    """From 0 on, or logarithmic where positive values are spread over more than max_spread. which: x or y."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    if positive and len(positive) == len(values) and max(positive) / min(positive) > max_spread:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        is_narrow = max(positive) / min(positive) < 1000
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_narrow else (1,)))
        # written out: 0.02, not 2e-2
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())
    elif which == "x":
        axes.set_xlim(left=0, right=1.12 * max(positive, default=1))
    else:
        axes.set_ylim(bottom=0, top=1.12 * max(positive, default=1))


def legend(figure: Figure, axes: Axes) -> None:
    """Below, of what has a label, each once, in as many columns as there is room for."""
    entries: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        entries.setdefault(label, handle)
    if entries:
        # a mark, and characters of the label's size
        column_inches = 0.6 + 0.075 * max(map(len, entries))
        num_columns = max(1, int(figure.get_figwidth() / column_inches))
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower left",
            ncols=min(len(entries), num_columns),
            handlelength=2.6,
        )


def _for_page(svg: bytes, key: str) -> str:
    """Without what only a file needs, without outside references, in the page's colours and font."""
    root = ElementTree.fromstring(svg)
    # a style sheet would be one for all of the page
    for parent in root.iter():
        for child in [child for child in parent if _local(child.tag) in ("metadata", "style")]:
            parent.remove(child)
    referenced = {
        next(filter(None, match.groups()))
        for element in root.iter()
        for value in element.attrib.values()
        for match in _REFERENCE.finditer(value)
    }
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.attrib.items()}
        if attributes.get("id") not in referenced:
            attributes.pop("id", None)
        element.attrib.clear()
        element.attrib.update({name: _attribute(name, value, key) for name, value in attributes.items()})
    # the page says how large
    del root.attrib["width"], root.attrib["height"]
    root.attrib.pop("version", None)
    root.set("class", "chart")
    root.set("aria-hidden", "true")
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == "href":
        return f"#{key}-{value.removeprefix('#')}"
    value = value.replace("url(#", f"url(#{key}-")
    if name == "style":
        value = _FONT.sub(r"\1var(--font)", value)
        value = _COLOUR.sub(lambda match: _VARIABLES.get(match[0], match[0]), value)
    return " ".join(value.split()) if name == "d" else value


def _local(name: str) -> str:
    return name.rpartition("}")[2]
