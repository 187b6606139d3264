"""Shows how a run comes along: a live bar on a terminal; elsewhere no more than a line when it begins."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from noria_bench.generator import Progress
from noria_bench.results import SeriesPoint

# over which tokens/s are told
WINDOW_S = 5.0


class RunDisplay:
    """For the time of one run, within a `with` block."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(name, total=None, line="")
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def __enter__(self) -> RunDisplay:
        if self._bar is None:
            self._console.print(f"{self._name}: started", highlight=False)
        else:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress, point: SeriesPoint | None) -> None:
        """point: the server's newest gauges; None where they cannot be read."""
        now = time.monotonic()
        self._recent.append((now, progress.num_tokens))
        while len(self._recent) > 2 and self._recent[1][0] < now - WINDOW_S:
            self._recent.popleft()
        if self._bar is not None and self._task is not None:
            line = progress_line(progress, point, self._tokens_per_s())
            self._bar.update(self._task, total=progress.num_requests, completed=progress.num_ended, line=line)

    def _tokens_per_s(self) -> float:
        (start_s, start), (end_s, end) = self._recent[0], self._recent[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0


def progress_line(progress: Progress, point: SeriesPoint | None, tokens_per_s: float) -> str:
    """For example `12 of 32 done, 1 failed, 8 running, 4 waiting, 93.1 tokens/s, TTFT p95 1.20 s, KV 40%`."""
    parts = [f"{progress.num_ended} of {progress.num_requests} done"]
    if progress.num_errors:
        parts.append(f"{progress.num_errors} failed")
    if point is None:
        parts.append(f"{progress.num_open} open")
    else:
        parts.append(f"{point.num_running:.0f} running, {point.num_waiting:.0f} waiting")
    parts.append(f"{tokens_per_s:.1f} tokens/s")
    if progress.ttft_p95_s is not None:
        parts.append(f"TTFT p95 {progress.ttft_p95_s:.2f} s")
    if point is not None:
        parts.append(f"KV {point.kv_usage:.0%}")
    return ", ".join(parts)
