"""The page as a browser would take it in: its figures, its structure, and that nothing leads out of it."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from noria_bench.reporting import palette
from noria_bench.reporting.environment import gist
from noria_bench.reporting.figures import number
from noria_bench.reporting.loaded import load_sources
from noria_bench.reporting.markup import Markup, element
from noria_bench.reporting.stylesheet import STYLESHEET
from noria_bench.results import write_result
from support.bench_results import HOSTILE, health, with_run, write_bench_result

pytest.importorskip("matplotlib")
from noria_bench.reporting.page import html_report

VOID = {"meta", "input", "img", "br"}
TITLE = """Ratios </title><script>alert("title")</script> $x$ & 'more'"""
SVG = b"""<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script><rect width="1" height="1"/></svg>"""


class Page(HTMLParser):
    """Elements, their attributes, texts, and tables by their captions."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.elements, self.texts, self.open, self.tables = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows, self.caption = [], ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.tables.setdefault(self.caption, self.rows)

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] == "caption":
            self.caption += data

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def column(self, caption, name):
        """Of a table: a list for its rows, by their first cell."""
        header, *rows = self.tables[caption]
        return {row[0]: row[header.index(name)] for row in rows}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "mixed"
    result = write_bench_result(folder, num_repeats=2, has_failures=True, has_capacities=True)
    result = with_run(result, 4, generator=health(("CPU share 0.97: <b>it</b> was the bottleneck",)))
    write_result(folder, with_run(result, 3, is_interrupted=True, mismatches=("tokens: client 5, server 6",)))
    (folder / "slots.svg").write_bytes(SVG)
    return load_sources([folder])


@pytest.fixture(scope="module")
def page(sources):
    return Page(html_report(sources, TITLE))


def test_figures_are_those_of_the_result(page, sources):
    for run in sources[0].result.runs:
        one, server = run.summary.all, run.summary.server
        assert page.column("Throughput", "output tokens/s")[run.name] == number(one.output_tokens_per_s)
        assert page.column("Throughput", "good share")[run.name] == f"{100 * one.good_share:.1f}%"
        assert page.column("Latencies", "TTFT, p99 s")[run.name] == number(one.ttft_s.p99)
        assert page.column("Latencies", "max gap, p95 ms")[run.name] == number(1000 * one.max_gap_s.p95)
        assert page.column("Latencies", "queue, median s")[run.name] == number(server.queue_s.median)
        assert page.column("Server", "slot utilisation")[run.name] == f"{100 * server.slot_utilisation:.1f}%"
        assert page.column("Server", "recomputed tokens")[run.name] == str(server.num_recomputed_tokens)
        assert page.column("How requests ended", "rejected")[run.name] == "2"
    side_by_side = page.column("Side by side: the workload's own arrivals", "static")
    valid = [run.summary.all.output_tokens_per_s for run in sources[0].result.runs[:1]]
    assert side_by_side["useful output tokens/s"] == number(valid[0])
    assert {row[1] for row in page.tables["Each class of requests"][1:]} == {"batch", "chat"}


def test_what_cannot_be_believed_stands_before_any_figure(page):
    start = page.text[: page.text.index("<table")]
    for said in ("Read this first", "interrupted", "tokens: client 5, server 6", "dynamic-1", "7 of 32 requests"):
        assert said in start
    assert "CPU share 0.97: &lt;b&gt;it&lt;/b&gt; was the bottleneck" in start
    assert page.column("Throughput", "status") == {
        "static-0": "valid",
        "dynamic-0": "valid",
        "inflight-0": "valid",
        "static-1": "interrupted",
        "dynamic-1": "invalid",
        "inflight-1": "valid",
    }


@pytest.mark.slow
def test_a_result_without_fault_says_so(tmp_path):
    write_bench_result(tmp_path / "fine", modes=["inflight"], num_requests=8, lengths=(4, 8))
    text = html_report(load_sources([tmp_path / "fine"]), "Fine")
    assert "All 1 runs are valid" in text
    assert "Read this first" not in text


def test_nothing_leads_out_of_the_page(page):
    assert not [tag for tag, _ in page.elements if tag in ("script", "link", "iframe", "object", "embed", "base")]
    for reference in page.attributes("src") + page.attributes("href") + page.attributes("xlink:href"):
        assert reference.startswith(("#", "data:image/svg+xml;base64,"))
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert "http" not in attributes.get("style", "")
    assert "@import" not in STYLESHEET
    assert "url(" not in STYLESHEET
    assert not re.search(r"""url\((?!#)""", page.text)
    [policy] = [values["content"] for tag, values in page.elements if "http-equiv" in values]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")


def test_hostile_texts_are_texts(page):
    whole = "".join(page.texts)
    assert """INTERNAL: <script>alert("x")</script> [red]$\\alpha$""" in whole
    assert """</title><script>alert("title")</script> $x$ & 'more'""" in whole
    # what turns the direction of writing, rings, or is half a character
    assert not re.search("[\u202e\x07\ud800]", page.text)
    assert any(one in HOSTILE for one in "\u202e\x07\ud800")


def test_attributes_are_escaped():
    written = element("a", "<&>", Markup("<b>"), title='"><script>', href=None, class_="x")
    assert written == '<a title="&quot;&gt;&lt;script&gt;" class="x">&lt;&amp;&gt;<b></a>'


def test_ids_are_unique_and_references_hold(page):
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    targets = [href[1:] for href in page.attributes("href") if href.startswith("#")]
    targets += page.attributes("aria-labelledby") + re.findall(r"url\(#([^)]+)\)", page.text)
    assert len(targets) > 20
    assert set(targets) <= set(ids)


def test_tables_and_sections_have_names(page):
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == 1
    assert tags.count("caption") == tags.count("table") > 10
    assert {attributes.get("scope") for tag, attributes in page.elements if tag == "th"} == {"col", "row"}
    scrolled = [attributes for _, attributes in page.elements if attributes.get("class") == "scroll"]
    assert all(one["tabindex"] == "0" and one["role"] == "region" for one in scrolled)
    assert ("html", {"lang": "en"}) in page.elements
    # a name for each chart, whose inside is hidden from those who cannot see it
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(charts) >= 6
    assert all(one["aria-hidden"] == "true" for one in charts)
    assert all(one["aria-label"] for _, one in page.elements if one.get("role") == "img")


def test_charts_take_their_colours_and_font_from_the_page(page):
    charts = "".join(re.findall(r"<svg.*?</svg>", page.text, re.DOTALL))
    used = set(re.findall(r"var\(--([\w-]+)\)", charts))
    assert {"ink", "muted", "grid", "static", "dynamic", "inflight", "font"} <= used
    assert "DejaVu" not in charts
    # colours that no variable stands for would be the same in light and in dark
    assert set(re.findall(r"#[0-9a-f]{6}", charts)) == set()
    assert not [colour.stand_in for colour in palette.ALL if colour.stand_in in page.text]


def test_both_schemes_define_all_colours(page):
    [style] = re.findall(r"<style>(.*?)</style>\s*</head>", page.text, re.DOTALL)
    used = set(re.findall(r"var\(--([\w-]+)\)", page.text)) - {"font"}
    light, system_dark, chosen_light, chosen_dark = (
        re.search(pattern, style).group(1)
        for pattern in (
            r"^\s*:root \{(.*?)\}",
            r"@media \(prefers-color-scheme: dark\) \{ :root \{(.*?)\}",
            r":root:has\(#theme-light:checked\) \{(.*?)\}",
            r":root:has\(#theme-dark:checked\) \{(.*?)\}",
        )
    )
    for scheme in (light, system_dark, chosen_light, chosen_dark):
        assert used <= set(re.findall(r"--([\w-]+):", scheme))
    assert system_dark == chosen_dark
    assert "color-scheme: dark" in system_dark
    assert {"theme-auto", "theme-light", "theme-dark"} <= set(page.attributes("id"))


def luminance(colour):
    """Of WCAG 2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(scheme):
    surfaces = [getattr(palette.SURFACE, scheme), *re.findall(r"--(?:page|raised): (#\w{6})", STYLESHEET)]
    grounds = [one for one in surfaces if (luminance(one) > 0.5) == (scheme == "light")]
    assert len(set(grounds)) == 3
    for colour in palette.ALL:
        if colour in (palette.SURFACE, palette.GRID):
            continue
        least = 4.5 if colour in (palette.INK, palette.MUTED, palette.ALARM) else 3
        for ground in grounds:
            lighter, darker = sorted((luminance(getattr(colour, scheme)), luminance(ground)), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= least, (colour, ground)


def test_a_mode_has_one_colour_and_others_take_the_rest():
    colours = palette.Palette(["chunk-512", "inflight", "chunk-64", "static"])
    assert colours.colour("inflight") is palette.Palette(["inflight"]).colour("inflight")
    assert len({colours.colour(label).name for label in ("chunk-512", "inflight", "chunk-64", "static")}) == 4


def test_a_slots_picture_can_run_nothing(page):
    [image] = [values for tag, values in page.elements if tag == "img"]
    assert base64.b64decode(image["src"].partition(",")[2]) == SVG


def test_environment_and_command_are_there(page, sources):
    assert page.column("Environment", "value")["packages.torch"] == "2.13.0"
    assert page.column("Environment", "value")["model.files.model.safetensors"] == "feed" * 16
    assert page.column("Environment of each run", "dynamic-1")["busy_cores_after"] == "0.75"
    assert page.column("Engine as loaded, of each run", "static-0")["batching_mode"] == "static"
    head = page.text[: page.text.index("<main")]
    assert "noria bench --modes static,dynamic,inflight" in head
    assert "5eed5eed5eed" in head
    assert (
        "Imaginary 2; 2 cores; noria 0.1.0; torch 2.13.0; model embedded in float32; source 0123456789ab, modified"
        in head
    )
    assert "before and after runs others kept 0.250 to 0.750 cores busy" in head


def test_what_was_not_written_down(sources):
    [source] = sources
    runs = [replace(run, environment={}) for run in source.result.runs]
    assert gist(replace(source.result, environment={"cpu": None}, runs=runs)) == "neighbours' load not recorded"


@pytest.mark.slow
def test_two_results_share_their_axes(tmp_path):
    for name, pace in (("before", 1.0), ("after", 0.8)):
        write_bench_result(tmp_path / name, num_requests=16, lengths=(4, 8, 32), pace=pace, num_repeats=2)
    page = Page(html_report(load_sources([tmp_path / "before", tmp_path / "after"]), "A and B"))
    rows = page.column("after: in-flight over before: in-flight, the workload's own arrivals", "ratio")
    assert rows["end to end, median s"] == "0.800"
    assert "before: static" in page.tables["Side by side: the workload's own arrivals"][0]


@pytest.mark.slow
def test_results_of_other_lengths_make_the_curve(tmp_path):
    for place, lengths in enumerate([(16,), (4, 8, 52)]):
        write_bench_result(tmp_path / f"cv{place}", num_requests=24, lengths=lengths, sha256=f"{place}" * 64)
    page = Page(html_report(load_sources([tmp_path / "cv0", tmp_path / "cv1"]), "Curve"))
    assert "predicted, in-flight" in "".join(page.texts)
    header, *rows = page.tables["Measured ratios beside what the lengths predict"]
    assert [row[header.index("predicted")] for row in rows[:2]] == ["1.00", "1.00"]


def test_a_small_result_without_requests_still_has_a_page(tmp_path):
    result = write_bench_result(tmp_path / "small", rates=(0.2, 0.4), num_requests=8, lengths=(4,), has_lines=False)
    unmeasured = replace(result.runs[0].summary, server=None)
    write_result(tmp_path / "small", with_run(result, 0, summary=unmeasured))
    text = html_report(load_sources([tmp_path / "small"]), "Small")
    assert "kept without its requests" in text
    assert "no server metrics" in text
    Page(text)


@pytest.mark.slow
def test_labels_from_anywhere(tmp_path):
    result = write_bench_result(tmp_path / "r", modes=["static", "inflight"], num_requests=8, lengths=(4, 8))
    label = "$\\frac{1}{0}$ <b>\x00 \u202e 中文 " + "long " * 40
    write_result(tmp_path / "r", with_run(result, 1, label=label))
    page = Page(html_report(load_sources([tmp_path / "r"]), "Labels"))
    assert "$\\frac{1}{0}$ <b>" in "".join(page.texts)
    assert "b" not in [tag for tag, _ in page.elements]
