"""Shows how a measurement comes along: a live bar on a terminal, now and then a plain line elsewhere.

Reads a `LoadRun`; changes nothing.
"""

from __future__ import annotations

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from noria_bench.load import LoadRun

BAR_INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0


async def show_progress(run: LoadRun, mode: str, console: Console) -> None:
    """Runs until it is cancelled."""
    started_s = time.monotonic()
    if not console.is_terminal:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            console.print(f"{mode}: {progress_line(run, time.monotonic() - started_s)}", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(mode, total=run.num_requests, line="")
        try:
            while True:
                await asyncio.sleep(BAR_INTERVAL_S)
                _update(progress, task, run, started_s)
        finally:
            _update(progress, task, run, started_s)


def _update(progress: Progress, task: TaskID, run: LoadRun, started_s: float) -> None:
    line = progress_line(run, time.monotonic() - started_s)
    progress.update(task, completed=len(run.records), line=line)


def progress_line(run: LoadRun, elapsed_s: float) -> str:
    """For example `8 open, 12 of 32 finished, 1 failed, 93.1 tokens/s so far`."""
    parts = [f"{run.num_running} open", f"{len(run.records)} of {run.num_requests} finished"]
    if run.num_errors:
        parts.append(f"{run.num_errors} failed")
    parts.append(f"{run.num_tokens / elapsed_s if elapsed_s > 0 else 0:.1f} tokens/s so far")
    return ", ".join(parts)
