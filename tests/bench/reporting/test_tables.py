"""What stands in tables, in a terminal, in Markdown and in CSV, against the results they are made of."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from noria_bench.reporting.csv_files import COLUMNS, csv_report
from noria_bench.reporting.figures import ALL, BY_KEY, Unit, number
from noria_bench.reporting.loaded import load_sources
from noria_bench.reporting.markdown import escaped, markdown_report
from noria_bench.reporting.tables import capacities
from noria_bench.reporting.terminal import comparison_markdown, comparison_table
from noria_bench.results import write_result
from support.bench_results import HOSTILE, health, with_run, write_bench_result


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "mixed"
    write_bench_result(folder, num_repeats=2, num_requests=32, has_failures=True, has_capacities=True)
    return load_sources([folder])[0]


def rendered(runs, width=160):
    console = Console(width=width, file=StringIO())
    console.print(comparison_table(runs))
    return console.file.getvalue()


def cells(text):
    """Of a table that rich drew, or of Markdown: by the first cell."""
    text = text.replace("┃", "│")
    mark = "│" if "│" in text else "|"
    lines = [[cell.strip() for cell in line.strip()[1:-1].split(mark)] for line in text.splitlines() if mark in line]
    return {line[0]: line[1:] for line in lines}


def header(runs):
    return next(iter(cells(rendered(runs)).values()))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (48.6586, "48.7"), (9.999, "10.0"), (196.4, "196"), (2.3674, "2.37"), (0.0123456, "0.0123")),
        *((1234567.8, "1,234,568"), (999.9, "1,000"), (-3.14159, "-3.14"), (1e-9, "1.00e-09"), (2.5e-6, "0.00000250")),
    ],
)
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text


def test_figures_as_text():
    assert BY_KEY["tpot_median_s"].text(0.12124) == "121"
    assert BY_KEY["slot_utilisation"].text(0.335) == "33.5%"
    assert BY_KEY["num_preemptions"].text(1.5) == "1.50"
    assert BY_KEY["num_preemptions"].text(12345) == "12,345"
    assert [BY_KEY["wall_s"].text(value) for value in (None, float("nan"), float("inf"))] == ["-", "-", "-"]


def test_every_figure_has_its_own_key_and_meaning():
    assert len(BY_KEY) == len(ALL)
    assert all(figure.meaning and isinstance(figure.unit, Unit) for figure in ALL)


def test_the_terminal_shows_labels_ratio_and_errors(source):
    runs = [run for run in source.result.runs if run.repeat == 0]
    rows = cells(rendered(runs))
    speeds = [run.summary.all.output_tokens_per_s for run in runs]
    assert rows["useful output tokens/s"] == [number(speed) for speed in speeds]
    assert rows["tokens/s, times static"] == [f"{speed / speeds[0]:.2f}" for speed in speeds]
    assert rows["slot utilisation"][0] == f"{100 * runs[0].summary.server.slot_utilisation:.1f}%"
    assert rows["TTFT s, p95"][2] == number(runs[2].summary.all.ttft_s.p95)
    assert rows["TPOT ms, median"][1] == number(1000 * runs[1].summary.all.tpot_s.median)
    assert rows["requests, done / cancelled / failed / all"] == ["24 / 1 / 7 / 32"] * 3
    assert rows["UNAVAILABLE: the queue is full"] == ["2", "2", "2"]


def test_brackets_in_an_error_are_no_markup(source):
    text = rendered(source.result.runs, width=400)
    assert "[red]$\\alpha$" in text
    assert "\x07" not in text


def test_repeats_are_one_column_and_loads_are_several(source, tmp_path):
    assert header(source.result.runs) == ["static", "dynamic", "in-flight"]
    assert cells(rendered(source.result.runs))["valid runs of all"] == ["2 of 2"] * 3
    result = write_bench_result(tmp_path / "r", modes=["inflight"], rates=(0.5, 2), num_requests=4, lengths=(2,))
    assert header(result.runs) == ["in-flight, 0.5/s", "in-flight, 2/s"]


def test_columns_say_what_cannot_be_believed(source):
    runs = list(with_run(with_run(source.result, 0, is_interrupted=True), 1, generator=health(("late",))).runs[:3])
    assert header(runs) == ["static (interrupted)", "dynamic (invalid)", "in-flight"]


def test_the_ratio_is_of_the_repeats_that_both_have(source):
    """A label whose second repeat is invalid was divided by the mean of two, which had sent other requests."""
    runs = list(with_run(source.result, 5, generator=health(("late",))).runs)
    assert runs[5].name == "inflight-1"
    row = cells(rendered(runs))["tokens/s, times static (same repeats)"]
    assert row[2] == f"{runs[2].summary.all.output_tokens_per_s / runs[0].summary.all.output_tokens_per_s:.2f}"


def test_a_run_without_server_metrics(source):
    run = source.result.runs[0]
    rows = cells(rendered([replace(run, summary=replace(run.summary, server=None))]))
    assert "slot utilisation" not in rows
    assert "useful output tokens/s" in rows


def test_markdown_has_a_column_for_each_label(source):
    lines = comparison_markdown([run for run in source.result.runs if run.repeat == 0]).splitlines()
    assert lines[0] == "|  | static | dynamic | in-flight |"
    assert lines[1] == "| --- | --- | --- | --- |"
    ttft = source.result.runs[0].summary.all.ttft_s
    row = next(line for line in lines if line.startswith("| TTFT s, median / p95 / p99 |"))
    assert row.split("|")[2].strip() == " / ".join(number(value) for value in (ttft.median, ttft.p95, ttft.p99))


def test_markdown_lets_nothing_through(source):
    report = markdown_report([source], "A *title* | <b>\n# not a heading")
    assert report.startswith("# A \\*title\\* \\| &lt;b&gt; \\# not a heading\n")
    assert "<script>" not in report
    assert "\x07" not in report
    tables = [line for line in report.splitlines() if line.startswith("|")]
    # every line of a table has as many cells as its header, whatever the errors hold
    assert {line.replace("\\|", "").count("|") for line in tables} == {5, 7, 8}
    assert escaped("a\nb|`c`") == "a b\\|\\`c\\`"


def test_markdown_says_first_what_is_wrong(source, tmp_path):
    broken = with_run(source.result, 0, generator=health(("CPU share 0.97",)), mismatches=("tokens: 1, not 2",))
    write_result(tmp_path, broken)
    report = markdown_report(load_sources([tmp_path]), "t")
    start = report[: report.index("\n## ", report.index("Read this first"))]
    assert "invalid: static-0. CPU share 0.97" in start
    assert "tokens: 1, not 2" in start
    assert "7 of 32 requests did not finish: 2 rejected, 2 expired, 2 failed, 1 aborted." in start


def test_csv_has_a_row_for_each_run_and_class(source):
    rows = list(csv.DictReader(io.StringIO(csv_report([source]))))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 6 * 3
    assert all(COLUMNS.values())
    for run in source.result.runs:
        whole, batch, chat = (row for row in rows if row["run"] == run.name)
        assert (whole["class"], batch["class"], chat["class"]) == ("", "batch", "chat")
        assert float(whole["output_tokens_per_s"]) == run.summary.all.output_tokens_per_s
        assert float(whole["ttft_p99_s"]) == run.summary.all.ttft_s.p99
        assert float(whole["slot_utilisation"]) == run.summary.server.slot_utilisation
        assert float(chat["tpot_median_s"]) == run.summary.classes["chat"].tpot_s.median
        # counted for the run, not for a class
        assert chat["slot_utilisation"] == ""
        assert int(whole["num_requests"]) == int(batch["num_requests"]) + int(chat["num_requests"])
        assert int(whole["num_errors"]) == run.summary.all.num_errors


def test_csv_texts_are_no_formulas(source, tmp_path):
    write_result(tmp_path / ".", with_run(source.result, 0, label="=HYPERLINK(1)", name='a,"b"\nc'))
    [row, *_] = csv.DictReader(io.StringIO(csv_report(load_sources([tmp_path]))))
    assert row["label"] == "'=HYPERLINK(1)"
    assert row["run"] == 'a,"b" c'


def test_capacities_are_said_as_they_are(source):
    rows = [row[2:5] for row in capacities([source]).rows]
    assert rows == [
        ("none: broken at the lowest rate tried", "-", "ttft_p95"),
        ("0.110", "0.0900 to 0.140 (bracket of one repeat)", "ttft_p95"),
        ("at least 0.420", "0.380 to 0.450 (bracket of one repeat)", "-"),
    ]


def test_the_hostile_text_is_in_the_results(source):
    """The tests above and those of the page prove nothing if it is not."""
    assert all(HOSTILE in run.summary.all.errors for run in source.result.runs)
