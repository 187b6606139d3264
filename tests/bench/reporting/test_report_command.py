"""The command: which files it writes, and what it says when it cannot."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from noria_bench.errors import BenchError
from noria_bench.report_command import add_report
from noria_bench.results import write_result
from support.bench_results import health, with_run, write_bench_result


@pytest.fixture
def folder(tmp_path):
    write_bench_result(tmp_path / "first", modes=["static", "inflight"], num_requests=8, lengths=(4, 8))
    return tmp_path / "first"


def report(*arguments):
    parser = argparse.ArgumentParser()
    add_report(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, arguments)])
    return args.run(args)


def without_matplotlib(monkeypatch):
    monkeypatch.setattr("noria_bench.reporting.drawing.find_spec", lambda name: None)


def test_the_page_lies_beside_the_result(folder, capsys):
    pytest.importorskip("matplotlib")
    assert report(folder) == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().err == f"{folder / 'report.html'}\n"


def test_all_forms_at_once(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ("--output", tmp_path / "a.html", "--markdown", tmp_path / "a.md", "--csv", tmp_path / "a.csv")
    assert report(folder / "result.json", *arguments, "--title", "My runs") == 0
    assert "<title>My runs</title>" in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.md").read_text().startswith("# My runs\n")
    assert (tmp_path / "a.csv").read_text().startswith("result,run,label,")
    assert not (folder / "report.html").exists()


def test_markdown_and_csv_need_no_matplotlib(folder, tmp_path, monkeypatch, capsys):
    without_matplotlib(monkeypatch)
    assert report(folder, "--markdown", "-") == 0
    assert "| useful output tokens/s |" in capsys.readouterr().out
    assert report(folder, "--csv", tmp_path / "a.csv") == 0
    with pytest.raises(BenchError, match=r"needs matplotlib: pip install 'noria\[plots\]'; --markdown and --csv"):
        report(folder)


def test_matplotlib_is_loaded_for_the_page_alone():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import noria_bench.report_command, noria_bench.reporting.terminal, noria_bench.reporting.page\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_grave_problems_are_said_at_once(folder, capsys):
    broken = with_run(write_bench_result(folder, num_requests=8, lengths=(4,)), 0, generator=health(("late",)))
    write_result(folder, broken)
    assert report(folder, "--csv", "-") == 0
    assert "noria: static-0: invalid. late" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "cannot read .*none"),
        ("list.json", "[]", "holds no JSON object"),
        ("other.json", "{}", "format must be 'noria-bench-1', not None"),
    ],
)
def test_what_is_no_result(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BenchError, match=message):
        report(tmp_path / name)


def test_files_that_cannot_be_written(folder, tmp_path):
    with pytest.raises(BenchError, match=r"no/a\.csv cannot be written: No such file or directory"):
        report(folder, "--csv", tmp_path / "no" / "a.csv")
    with pytest.raises(BenchError, match="only one of them can be -"):
        report(folder, "--csv", "-", "--markdown", "-")


def test_a_damaged_file_of_requests(folder):
    (folder / "static-0.requests.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(BenchError, match=r"cannot read .*static-0\.requests"):
        report(folder, "--markdown", "-")
