"""What keeps a run from being believed, or a reader from seeing all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noria_bench.records import Outcome
from noria_bench.reporting.loaded import Source
from noria_bench.reporting.text import plain
from noria_bench.results import Run

_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Problem:
    """runs: that have it. kind: in a word or two. is_grave: their figures must not be believed, and are left out where
    there are others."""

    runs: str
    kind: str
    text: str
    is_grave: bool


def problems_of(sources: Sequence[Source]) -> list[Problem]:
    """The grave ones first; runs that have the same one together."""
    names: dict[tuple[bool, str, str], list[str]] = {}
    for source in sources:
        for run in source.result.runs:
            name = plain(run.name if len(sources) == 1 else f"{source.name}: {run.name}", 100)
            for problem in _of_run(run):
                names.setdefault(problem, []).append(name)
    return [
        Problem(_listed(of_problem), kind, text, is_grave)
        for (is_grave, kind, text), of_problem in sorted(names.items(), key=lambda item: (not item[0][0], item[0][1]))
    ]


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _of_run(run: Run) -> list[tuple[bool, str, str]]:
    """Whether it is grave, its kind and its text."""
    found = [(True, "invalid", plain(text)) for text in run.generator.problems]
    if run.is_interrupted:
        found.append((True, "interrupted", "It ended before its workload did."))
    found += [(False, "mismatch of client and server", plain(text)) for text in run.mismatches]
    if run.summary.server is None:
        found.append((False, "no server metrics", "Queue, slots, batch and KV cache are not known."))
    one = run.summary.all
    if one.num_errors:
        kinds = [
            f"{one.outcomes[outcome.value]} {outcome.value}"
            for outcome in Outcome
            if outcome not in (Outcome.FINISHED, Outcome.CANCELLED) and one.outcomes.get(outcome.value)
        ]
        text = f"{one.num_errors} of {one.num_requests} requests did not finish: {', '.join(kinds)}."
        found.append((False, "failed requests", text))
    return found
