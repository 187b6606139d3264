"""Runs the stages, each in a process of its own: a fault or a hang of the GPU in one leaves the others alone.

A stage is a list of units with names. Its process writes down which unit it begins and what came of it, line by line;
if it dies, or takes too long, the unit under way has failed and another process goes on behind it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.rows import Row

# how often a stage may die before the rest of it is left out
MAX_DEATHS = 3
# of a process whose GPU answers no more
LOST_CONTEXT = 3
# seconds beyond a stage's time before its process is ended
GRACE_S = 20.0
# a unit that takes so many times as long as it should, and so many seconds more, hangs
LIMIT_FACTOR, LIMIT_S = 4.0, 45.0


@dataclass(frozen=True)
class Unit:
    """run: gives the rows; what it raises is a row too. seconds: about, below which it is not begun."""

    name: str
    run: Callable[[], Sequence[Row]]
    seconds: float


# makes the units, in the stage's own process: from here on the GPU may be touched. And tells whether it still answers
MakeUnits = Callable[[], tuple[Iterable[Unit], Callable[[], None]]]


def say(words: str) -> None:
    print(words, flush=True)


def run_stage(stage: str, make_units: MakeUnits, seconds: float, folder: Path) -> list[Row]:
    """All rows of the stage, within so many seconds."""
    path = folder / f"{stage}.jsonl"
    path.touch()
    deadline = time.time() + seconds
    deaths: list[Row] = []
    for _ in range(MAX_DEATHS):
        lines = list(_lines(path))
        done = {line["begin"] for line in lines if "begin" in line}
        process = multiprocessing.get_context("fork").Process(
            target=_run_units, args=(stage, make_units, deadline, path, frozenset(done))
        )
        process.start()
        try:
            words = _wait(process, path, deadline)
        finally:
            if process.is_alive():
                process.kill()
                process.join()
        if not words:
            break
        lines = list(_lines(path))
        under_way = {line["begin"] for line in lines if "begin" in line} - {x["end"] for x in lines if "end" in x}
        for name in sorted(under_way - {row.name for row in deaths}):
            deaths.append(Row(stage, name, is_exact=_unless_measured(stage), error=words))
        say(f"{stage}: {', '.join(sorted(under_way)) or 'its process'}: {words}")
        if not under_way and not any("begin" in line and line["begin"] not in done for line in lines):
            deaths.append(Row(stage, "its process", is_exact=_unless_measured(stage), error=words))
            break
        if time.time() > deadline:
            break
    else:
        deaths.append(Row(stage, "the rest of the stage", error=f"left out: its process died {MAX_DEATHS} times"))
    return [*(Row(**line["row"]) for line in _lines(path) if "row" in line), *deaths]


def _wait(process: Any, path: Path, deadline: float) -> str:
    """What went wrong, or nothing. Ends the process where a unit, or the stage, takes too long."""
    while process.is_alive():
        process.join(0.2)
        begins = [line for line in _lines(path) if "begin" in line]
        limit = min([deadline + GRACE_S, *(line["until"] for line in begins[-1:])])
        has_ended = begins and any(line.get("end") == begins[-1]["begin"] for line in _lines(path))
        if process.is_alive() and time.time() > (deadline + GRACE_S if has_ended else limit):
            process.kill()
            process.join()
            return "it took too long"
    return "" if process.exitcode == 0 else f"its process ended: {_reason(process.exitcode)}"


def _unless_measured(stage: str) -> bool | None:
    """is_exact of what failed."""
    return False if stage == "exactness" else None


def _reason(exitcode: int | None) -> str:
    if exitcode == LOST_CONTEXT:
        return "the GPU's context was lost"
    return f"signal {-exitcode}" if exitcode is not None and exitcode < 0 else f"exit status {exitcode}"


def _run_units(stage: str, make_units: MakeUnits, deadline: float, path: Path, done: frozenset[str]) -> None:
    """In the stage's process, which it ends."""
    code = 0
    with path.open("a", encoding="utf-8") as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            units, check = make_units()
            for unit in units:
                if unit.name not in done:
                    _run_unit(stage, unit, deadline, write)
                    check()
        except BaseException:
            traceback.print_exc()
            code = LOST_CONTEXT
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of a library that does not end would keep the process
    os._exit(code)


def _run_unit(stage: str, unit: Unit, deadline: float, write: Callable[..., None]) -> None:
    left = deadline - time.time()
    if left < unit.seconds:
        note = f"{max(0, left):.0f} s were left of the stage's time, and it takes about {unit.seconds:.0f}"
        write(row=_fields(Row(stage, unit.name, note=note)))
        return
    write(begin=unit.name, until=time.time() + LIMIT_FACTOR * unit.seconds + LIMIT_S)
    started = time.perf_counter()
    try:
        rows = list(unit.run())
    except Exception as error:
        traceback.print_exc()
        rows = [Row(stage, unit.name, is_exact=_unless_measured(stage), error=f"{type(error).__name__}: {error}")]
    for row in rows:
        write(row=_fields(row))
    seconds = time.perf_counter() - started
    say(f"{stage}: {unit.name}: {rows[0].verdict if rows and rows[0].verdict else 'done'} ({seconds:.1f} s)")
    write(end=unit.name, seconds=seconds)


def _fields(row: Row) -> dict[str, Any]:
    document = row.document()
    del document["verdict"]
    return document


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # of a process that was ended while it wrote
            continue


def unit_seconds(folder: Path, stage: str) -> dict[str, float]:
    path = folder / f"{stage}.jsonl"
    return {line["end"]: line["seconds"] for line in _lines(path) if "end" in line} if path.exists() else {}
