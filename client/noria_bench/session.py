"""Runs of several modes or configurations in turn, so that what drifts on the machine meets all of them alike.

Knows the order, and keeps each run as soon as it is there; how a server is started is the caller's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from noria_bench.errors import BenchError
from noria_bench.measurement import MeasuredRun, RunPlan, ServerUrls, measure
from noria_bench.records import Outcome
from noria_bench.results import FILE, Capacity, Result, Run, requests_path, series_path, write_lines, write_result
from noria_bench.summary import ClassSummary

# beyond, a run says that it had neighbours
MAX_BUSY_CORES = 0.3


@dataclass(frozen=True)
class Variant:
    """label: a mode, or the name of a configuration. start: a ready server for the time of a context. engine: its
    configuration as loaded, as far as the caller knows it."""

    label: str
    start: Callable[[], AbstractContextManager[ServerUrls]]
    engine: Mapping[str, Any] = field(default_factory=dict)


class ResultFolder:
    """A result that grows: each run is on the disk when `add` returns, so an interrupt loses none."""

    def __init__(self, folder: Path, result: Result, keeps_records: bool = True) -> None:
        self._folder = folder
        self._result = result
        self._keeps_records = keeps_records
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            write_result(folder, result)

    @property
    def result(self) -> Result:
        return self._result

    def add(self, measured: MeasuredRun) -> None:
        run = measured.run
        if self._keeps_records:
            with self._writing():
                write_lines(requests_path(self._folder, run.name), (record.to_json() for record in measured.records))
                write_lines(series_path(self._folder, run.name), (asdict(point) for point in measured.series))
        self._write(replace(self._result, runs=[*self._result.runs, run]))

    def add_capacity(self, capacity: Capacity) -> None:
        self._write(replace(self._result, capacities=[*self._result.capacities, capacity]))

    def discard_if_empty(self) -> None:
        """Nothing was measured: leave no result that looks as if."""
        if not self._result.runs:
            (self._folder / FILE).unlink(missing_ok=True)
            # what an interrupt left in it is for somebody to look at
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def _write(self, result: Result) -> None:
        self._result = result
        with self._writing():
            write_result(self._folder, result)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BenchError(f"--output {self._folder}: {error.strerror or error}") from None


def turns(variants: Sequence[Variant], num_repeats: int) -> Iterator[tuple[int, Variant]]:
    """Every variant once a repeat, forwards and backwards in turn: A B C, C B A, A B C. A pace that drifts steadily
    then favours nobody."""
    for repeat in range(num_repeats):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            yield repeat, variant


def run_session(
    variants: Sequence[Variant],
    num_repeats: int,
    plan_of: Callable[[Variant, int], RunPlan],
    folder: ResultFolder,
    console: Console,
) -> bool:
    """Each variant `num_repeats` times, each time on a server started for it. False if Ctrl-C ended it early.

    plan_of: what to run for a variant and a repeat.
    """
    try:
        for repeat, variant in turns(variants, num_repeats):
            with variant.start() as urls:
                measured = measure_into(folder, urls, plan_of(variant, repeat), console)
            if measured.run.is_interrupted:
                return False
    except KeyboardInterrupt:
        return False
    return True


def measure_into(folder: ResultFolder, urls: ServerUrls, plan: RunPlan, console: Console) -> MeasuredRun:
    measured = measure(urls, plan, console)
    console.print(run_line(measured.run), highlight=False, markup=False, soft_wrap=True)
    folder.add(measured)
    return measured


def run_line(run: Run) -> str:
    """What came out, and all that speaks against it."""
    lines = [f"{run.name}: {_figures_line(run.summary.all)}"]
    if len(run.summary.classes) > 1:
        lines += [f"  {name}: {_figures_line(one)}" for name, one in run.summary.classes.items()]
    lines += [f"  NOT VALID: {problem}" for problem in run.generator.problems]
    num_busy = run.environment.get("busy_cores_before", 0.0)
    if num_busy > MAX_BUSY_CORES:
        lines.append(f"  others took {num_busy:.1f} cores just before it: read ratios, not absolute figures")
    lines += [f"  client and server disagree on {mismatch}" for mismatch in run.mismatches]
    lines += [f"  {count} without a whole answer: {error}" for error, count in run.summary.all.errors.items()]
    return "\n".join(lines)


def _figures_line(summed: ClassSummary) -> str:
    parts = [f"{summed.num_finished} of {summed.num_requests} answered"]
    num_cancelled = summed.outcomes.get(Outcome.CANCELLED.value, 0)
    if num_cancelled:
        parts.append(f"{num_cancelled} cancelled as asked")
    if summed.output_tokens_per_s is not None:
        parts.append(f"{summed.output_tokens_per_s:.1f} tokens/s")
    if summed.ttft_s is not None:
        parts.append(f"TTFT {summed.ttft_s.median:.2f} s, p95 {summed.ttft_s.p95:.2f} s")
    if summed.tpot_s is not None:
        parts.append(f"TPOT {summed.tpot_s.median * 1000:.0f} ms, p95 {summed.tpot_s.p95 * 1000:.0f} ms")
    if summed.good_share is not None:
        parts.append(f"{summed.good_share:.0%} within the SLO")
    return ", ".join(parts)
