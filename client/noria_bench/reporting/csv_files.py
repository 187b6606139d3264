"""A report as CSV: a row for each run and each class of its requests. Needs no matplotlib."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from noria_bench.reporting import figures as catalogue
from noria_bench.reporting.loaded import Source, num_slots
from noria_bench.reporting.text import plain
from noria_bench.results import Run
from noria_bench.summary import ClassSummary

# the class of a row that sums up all classes: no class's name is empty
ALL_CLASSES = ""
_COLUMNS_OF_RUN = {
    "result": "name of the result's folder",
    "run": "name of the run",
    "label": "batching mode or configuration",
    "repeat": "from 0",
    "seed": "of the workload's lengths, prompts and arrivals",
    "rate_per_s": "requests a second of an open loop; empty otherwise",
    "concurrency": "requests under way in a closed loop; empty otherwise",
    "slots": "sequences in a step at most",
    "workload_sha256": "of what is sent",
    "output_cv": "coefficient of variation of the workload's output lengths, where it says so",
    "started_at": "as the result has it",
    "is_valid": "1 if the load generator kept up and the run was not interrupted",
    "is_interrupted": "1 if so",
    "num_mismatches": "disagreements of the client's ledger with the server's counters",
    "class": "of requests; empty for all together, where alone the server's figures stand",
}
# name: what it means; times are in seconds and shares from 0 to 1, whatever tables show
COLUMNS: dict[str, str] = {
    **_COLUMNS_OF_RUN,
    **{figure.key: figure.meaning for figure in catalogue.ALL},
    "num_errors": "requests that neither finished nor were cancelled on purpose",
}


def csv_report(sources: Sequence[Source]) -> str:
    """A header of COLUMNS; an empty cell where there is no figure."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    for source in sources:
        for run in source.result.runs:
            writer.writerow(_row(source, run, ALL_CLASSES, run.summary.all))
            for name, one in run.summary.classes.items():
                writer.writerow(_row(source, run, name, one))
    return file.getvalue()


def _row(source: Source, run: Run, name: str, one: ClassSummary) -> dict[str, object]:
    is_whole = one is run.summary.all
    return {
        "result": _text(source.name),
        "run": _text(run.name),
        "label": _text(run.label),
        "repeat": run.repeat,
        "seed": run.seed,
        "rate_per_s": run.rate,
        "concurrency": run.concurrency,
        "slots": num_slots(run),
        "workload_sha256": _text(source.workload_hash or ""),
        "output_cv": source.output_cv,
        "started_at": _text(run.started_at),
        "is_valid": int(run.is_valid),
        "is_interrupted": int(run.is_interrupted),
        "num_mismatches": len(run.mismatches),
        "class": _text(name),
        **{
            figure.key: _number(figure.read(run, one))
            for figure in catalogue.ALL
            if is_whole or not figure.is_of_server
        },
        "num_errors": one.num_errors,
    }


def _number(value: float | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _text(text: str) -> str:
    """Spreadsheets take what begins so for a formula."""
    safe = plain(text)
    return f"'{safe}" if safe[:1] in ("=", "+", "-", "@") else safe
