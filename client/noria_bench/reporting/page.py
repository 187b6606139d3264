"""The report as one HTML page, which reaches for nothing outside itself.

Its content security policy forbids scripts and the network, so that not even a text that slipped through could do harm.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from noria_bench.reporting import csv_files, tables
from noria_bench.reporting import figures as catalogue
from noria_bench.reporting.chart_sets import family_charts, summary_charts
from noria_bench.reporting.charts import Chart
from noria_bench.reporting.comparison import Comparison, comparisons_of
from noria_bench.reporting.drawing import check_can_draw
from noria_bench.reporting.environment import environment_tables, gist
from noria_bench.reporting.loaded import Family, Source, families_of
from noria_bench.reporting.markup import Markup, element, html_table, join
from noria_bench.reporting.palette import Palette
from noria_bench.reporting.problems import Problem, problems_of
from noria_bench.reporting.ratio import ratio_points, ratio_table
from noria_bench.reporting.stylesheet import STYLESHEET
from noria_bench.reporting.tables import Table
from noria_bench.reporting.text import plain

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
# of one workload; more stand folded
_MAX_OPEN_LOADS = 2
_MAX_PROBLEMS = 40


def html_report(sources: Sequence[Source], title: str) -> str:
    """Raises BenchError where matplotlib is missing, or a result's file is damaged."""
    check_can_draw()
    return _Page(sources, plain(title, 200)).html()


class _Page:
    """Hands out ids, and keeps what several sections need."""

    def __init__(self, sources: Sequence[Source], title: str) -> None:
        self._sources = sources
        self._title = title
        self._families = families_of(sources)
        self._palette = Palette(setting.label for source in sources for setting in source.settings)
        self._numbers = count(1)

    def html(self) -> str:
        sections = [(name, slug, content) for name, slug, content in self._sections() if content]
        links = (element("li", element("a", name, href=f"#{slug}")) for name, slug, _ in sections)
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", self._title),
            element("style", Markup(STYLESHEET)),
        )
        body = element(
            "body",
            element(
                "header",
                element("h1", self._title),
                *map(_facts, self._sources),
                _theme(),
                element("nav", element("ul", *links), aria_label="Sections"),
            ),
            element(
                "main",
                _alert(problems_of(self._sources), sum(len(source.result.runs) for source in self._sources)),
                *(
                    element(
                        "section",
                        element("h2", name, id=f"{slug}-title"),
                        content,
                        id=slug,
                        aria_labelledby=f"{slug}-title",
                    )
                    for name, slug, content in sections
                ),
            ),
            element("footer", "Written by noria report. Percentiles interpolate linearly between the closest ranks."),
        )
        return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"

    def _sections(self) -> Iterator[tuple[str, str, Markup]]:
        points = ratio_points(self._sources)
        charts = summary_charts(self._sources, points, self._palette, self._numbers)
        yield (
            "Capacity and ratios",
            "capacity",
            join(
                self._table(tables.capacities(self._sources)),
                self._table(ratio_table(points)),
                self._charts(charts),
            ),
        )
        for place, family in enumerate(self._families, 1):
            name = ", ".join(source.name for source in family.sources)
            yield name, f"results-{place}", self._family(family)
        comparisons = comparisons_of(self._sources)
        if comparisons:
            yield "Comparisons", "comparisons", join(_COMPARISON_NOTE, *map(self._comparison, comparisons))
        yield "Each run", "runs", join(*(self._runs(source) for source in self._sources))
        yield "Environment", "environment", join(*(self._environment(source) for source in self._sources))
        yield "Definitions", "definitions", self._definitions()

    def _family(self, family: Family) -> Markup:
        parts = []
        loads = family.loads
        if len(loads) > 1:
            parts.append(self._table(tables.overview(family)))
            parts.append(_note("Means over valid runs; where there are several, ± half a 95% interval (Student's t)."))
        for load in loads:
            pairs = family.at(load)
            names = [family.name(*pair) for pair in pairs]
            caption = f"Side by side: {load}"
            is_folded = len(loads) > _MAX_OPEN_LOADS
            side_by_side = tables.side_by_side([setting for _, setting in pairs], names, caption)
            table = self._table(side_by_side, has_title=is_folded)
            parts.append(_folded(caption, table) if is_folded else table)
        charts = family_charts(family, self._palette, self._numbers)
        parts.append(self._charts(charts))
        if not any(source.records(run) for source in family.sources for run in source.result.runs):
            parts.append(_note("This result was kept without its requests: what needs them is not shown."))
        return join(*parts)

    def _comparison(self, comparison: Comparison) -> Markup:
        table = tables.comparison_rows(comparison)
        notes = (element("p", element("strong", note)) for note in comparison.notes)
        content = join(*notes, self._table(table, has_title=True))
        return _folded(table.caption, content, is_open=comparison.load == _last_load(self._families))

    def _runs(self, source: Source) -> Markup:
        groups = (
            ("Throughput", catalogue.THROUGHPUT),
            ("Latencies", (*catalogue.LATENCY, *catalogue.QUEUE)),
            ("Server", catalogue.SERVER),
            ("Load generator", catalogue.GENERATOR),
        )
        return join(
            element("h3", source.name) if len(self._sources) > 1 else None,
            self._table(tables.outcomes(source)),
            self._table(tables.errors(source)),
            *(self._table(tables.each_run(source, figures, caption)) for caption, figures in groups),
            self._table(tables.each_class(source)),
        )

    def _environment(self, source: Source) -> Markup:
        return join(
            element("h3", source.name),
            element("p", "Measured with"),
            element("pre", element("code", plain(shlex.join(map(str, source.result.command)), 4000))),
            *map(self._table, environment_tables(source.result)),
        )

    def _definitions(self) -> Markup:
        titles = {figure.key: tables.title(figure) for figure in catalogue.ALL}
        rows = tuple(
            (column, titles.get(column, catalogue.NOTHING), meaning) for column, meaning in csv_files.COLUMNS.items()
        )
        table = Table("Figures, and the columns of the CSV", ("CSV column", "shown as", "meaning"), rows, has_text=True)
        note = _note(
            "Latencies and tokens are those of finished requests, by the client's clock. In the CSV times are in "
            "seconds and shares run from 0 to 1."
        )
        return _folded("All figures and what they mean", join(note, self._table(table, has_title=True)))

    def _table(self, table: Table | None, has_title: bool = False) -> Markup | None:
        return html_table(table, self._numbers, has_title) if table is not None and table.rows else None

    def _charts(self, charts: Iterable[Chart]) -> Markup | None:
        figures = [_figure(chart) for chart in charts]
        return element("div", *figures, class_="charts") if figures else None


_COMPARISON_NOTE = element(
    "p",
    "A ratio above 1 means more, not better. Paired repeats sent the same requests; their ratios have Student's "
    "interval. An interval from drawing requests again knows nothing of how much the machine's pace drifts from run to "
    "run, nor that requests of a run share its batches: the true one is wider, and what it shows is of these runs. "
    "Of twenty figures without a difference one is expected to show one.",
    class_="note",
)


def _facts(source: Source) -> Markup:
    result = source.result
    num_labels = len({run.label for run in result.runs})
    digest = (source.workload_hash or "unknown")[:12]
    text = (
        f"{source.name}: measured {plain(result.created_at, 40)}, {len(result.runs)} runs of {num_labels} labels, "
        f"workload {plain(result.workload.get('source', 'unnamed'), 60)}, SHA-256 {plain(digest)}."
    )
    command = plain(shlex.join(map(str, result.command)), 400)
    return join(_note(text), _note(gist(result)), element("p", element("code", command), class_="note"))


def _theme() -> Markup:
    choices = (("auto", "as the system"), ("light", "light"), ("dark", "dark"))
    labels = (
        element(
            "label",
            element("input", type="radio", name="theme", id=f"theme-{value}", checked=value == "auto"),
            f" {text}",
        )
        for value, text in choices
    )
    return element("fieldset", element("legend", "Colours"), *labels, class_="theme")


def _alert(problems: Sequence[Problem], num_runs: int) -> Markup:
    if not problems:
        text = (
            f"All {num_runs} runs are valid: the load generator kept up, none was interrupted, every request ended "
            "as the workload asked, and the client's ledger agrees with the server's counters."
        )
        return element("div", element("p", text), class_="alert fine")
    items = [
        element(
            "li",
            element("span", problem.kind, class_="kind"),
            f": {problem.runs}. {problem.text}",
            class_="grave" if problem.is_grave else None,
        )
        for problem in problems[:_MAX_PROBLEMS]
    ]
    num_more = len(problems) - len(items)
    more = element("li", f"and {num_more} more, in the tables of runs") if num_more else None
    has_grave = any(problem.is_grave for problem in problems)
    note = "Invalid and interrupted runs are left out of means, charts and ratios wherever a label has valid ones."
    return element(
        "section",
        element("h2", "Read this first", id="problems-title"),
        element("ul", *items, more),
        element("p", note, class_="note") if has_grave else None,
        class_="alert" if has_grave else "alert mild",
        aria_labelledby="problems-title",
    )


def _figure(chart: Chart) -> Markup:
    picture = element("img", src=chart.svg, alt="") if chart.is_image else Markup(chart.svg)
    # the picture's words are no reading order: its title and caption, and the tables, say what it shows
    drawing = element("div", picture, role="img", aria_label=chart.title)
    if chart.is_wide:
        drawing = element("div", drawing, class_="scroll", role="region", tabindex="0", aria_label=chart.title)
    return element(
        "figure",
        drawing,
        element("figcaption", chart.caption),
        class_="wide" if chart.is_wide else None,
    )


def _folded(summary: str, content: Markup | None, is_open: bool = False) -> Markup:
    return element("details", element("summary", summary), content, open=is_open)


def _note(text: str) -> Markup:
    return element("p", text, class_="note")


def _last_load(families: Sequence[Family]) -> object:
    return families[0].shown_loads(1)[0] if families else None
