"""`noria report`: its flags, and which files it writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from noria_bench.errors import BenchError
from noria_bench.reporting.csv_files import csv_report
from noria_bench.reporting.loaded import load_sources
from noria_bench.reporting.markdown import markdown_report
from noria_bench.reporting.problems import problems_of

STDOUT = "-"


def add_report(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "report",
        help="show results of noria bench as one HTML page, as Markdown or as CSV",
        description="Writes tables, charts and comparisons of one or many results. Without --output, --markdown and "
        "--csv the page is report.html in the first result's directory. It needs matplotlib (noria[plots]); Markdown "
        "and CSV do not. What the CSV's columns mean stands at the page's end.",
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="a result's directory or result.json")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="write the page there")
    parser.add_argument("--markdown", metavar="FILE", help="write tables as Markdown; - prints them")
    parser.add_argument("--csv", metavar="FILE", help="write a row for each run and class of requests; - prints them")
    parser.add_argument("--title", help="of the page (default: the results' names)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises BenchError for results that cannot be read and files that cannot be written."""
    if args.markdown == args.csv == STDOUT:
        raise BenchError("--markdown and --csv: only one of them can be -, standard output")
    sources = load_sources(args.results)
    title = args.title or "noria bench: " + ", ".join(source.name for source in sources)
    output: Path | None = args.output
    if output is None and args.markdown is None and args.csv is None:
        output = (sources[0].folder or Path()) / "report.html"
    if args.markdown is not None:
        _write(args.markdown, markdown_report(sources, title))
    if args.csv is not None:
        _write(args.csv, csv_report(sources))
    if output is not None:
        # brings matplotlib in
        from noria_bench.reporting.page import html_report

        _write(str(output), html_report(sources, title))
    for problem in problems_of(sources):
        if problem.is_grave:
            print(f"noria: {problem.runs}: {problem.kind}. {problem.text}", file=sys.stderr)
    return 0


def _write(path: str, text: str) -> None:
    if path == STDOUT:
        print(text, end="")
        return
    try:
        # half a surrogate pair in an error's text is no reason to have no report
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from None
    print(path, file=sys.stderr)
