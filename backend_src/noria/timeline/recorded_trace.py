"""Reads back what `engine.trace` has written. Knows the file's format, not what a picture of it looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from noria.engine.trace import FORMAT, VERSION, RowKind
from noria.errors import ConfigError


class RecordedRow(NamedTuple):
    """A row of a step: num_tokens are computed at positions num_computed_tokens onwards."""

    request_id: int
    num_computed_tokens: int
    num_tokens: int
    kind: RowKind


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step; the fields are those of SchedulerOutput.

    started_s: when the scheduler had been asked and the step before was over; ended_s: when the runner had answered.
    """

    step: int
    started_s: float
    ended_s: float
    rows: tuple[RecordedRow, ...]
    admitted_request_ids: tuple[int, ...]
    preempted_request_ids: tuple[int, ...]
    swapped_out_request_ids: tuple[int, ...]
    num_running: int
    num_waiting: int
    num_allocated_blocks: int
    num_cached_blocks: int
    num_swapped_in_blocks: int
    num_swapped_out_blocks: int
    num_prefix_hit_tokens: int
    num_lost_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """When a request got its last output, and why."""

    request_id: int
    ended_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """All of one file: what the engine was, its steps and its requests' ends in the order in which they came."""

    mode: str
    max_num_seqs: int
    num_blocks: int
    block_size: int
    steps: tuple[RecordedStep, ...]
    ends: tuple[RecordedEnd, ...]

    @property
    def slot_utilisation(self) -> float:
        """The share of the slots of all steps in which an unfinished sequence was computed; see EngineStats."""
        num_useful = sum(row.kind is not RowKind.PADDING for step in self.steps for row in step.rows)
        # one without rows only copied blocks
        num_steps = sum(bool(step.rows) for step in self.steps)
        return num_useful / (num_steps * self.max_num_seqs) if num_steps else 0.0

    @property
    def started_s(self) -> float:
        return self.steps[0].started_s

    @property
    def ended_s(self) -> float:
        return self.steps[-1].ended_s


def read_trace(path: Path) -> RecordedTrace:
    """The trace in the file. A last line that breaks off, as a killed server leaves it, is left out.

    Raises ConfigError naming the file and the line that is not as it must be, and for a file without a step.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    # what follows the last line's end was cut off while it was written
    lines = text[: text.rfind("\n") + 1].splitlines()
    with _errors_at(path, 1):
        header = _decode(lines[0] if lines else "{}")
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"must be the header of a {FORMAT!r} of version {VERSION}")
        engine = {key: header[key] for key in ("mode", "max_num_seqs", "num_blocks", "block_size")}
    steps: list[RecordedStep] = []
    ends: list[RecordedEnd] = []
    for number, line in enumerate(lines[1:], start=2):
        with _errors_at(path, number):
            values = _decode(line)
            if "step" in values:
                steps.append(_step(values))
            else:
                ends.append(RecordedEnd(values["request"], values["end"], values["reason"]))
    if not steps:
        raise ConfigError(f"{path}: no step was recorded")
    return RecordedTrace(**engine, steps=tuple(steps), ends=tuple(ends))


@contextmanager
def _errors_at(path: Path, number: int) -> Iterator[None]:
    """Names the line in what goes wrong within."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{path}, line {number}: has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None


def _decode(line: str) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    return values


def _step(line: Mapping[str, Any]) -> RecordedStep:
    return RecordedStep(
        step=line["step"],
        started_s=line["start"],
        ended_s=line["end"],
        rows=tuple(
            RecordedRow(request_id, start, num_tokens, RowKind(kind))
            for request_id, start, num_tokens, kind in line["rows"]
        ),
        admitted_request_ids=tuple(line.get("admitted", ())),
        preempted_request_ids=tuple(line.get("preempted", ())),
        swapped_out_request_ids=tuple(line.get("swapped_out", ())),
        num_running=line.get("running", 0),
        num_waiting=line.get("waiting", 0),
        num_allocated_blocks=line.get("allocated", 0),
        num_cached_blocks=line.get("cached", 0),
        num_swapped_in_blocks=line.get("blocks_in", 0),
        num_swapped_out_blocks=line.get("blocks_out", 0),
        num_prefix_hit_tokens=line.get("prefix_hits", 0),
        num_lost_tokens=line.get("lost", 0),
    )
