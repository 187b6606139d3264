"""Reads recorded arrivals: the CSV format of the Azure LLM inference traces (Patel et al., Splitwise, ISCA 2024)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from noria.errors import ConfigError
from noria.simulation.requests import SimRequest

TIME, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure_trace(
    path: Path,
    *,
    speed: float = 1.0,
    limit: int | None = None,
    max_prompt_len: int | None = None,
    max_output_len: int | None = None,
    is_clipping: bool = True,
) -> list[SimRequest]:
    """The first `limit` requests of a trace; the first of all arrives at 0.

    speed: 2 makes the same arrivals come twice as fast.
    max_prompt_len, max_output_len: a longer request is cut down to them if is_clipping, else left out. A request of no
        output tokens yields one: every engine gives at least that.
    Raises ConfigError naming the line and the column.
    """
    if not speed > 0:
        raise ConfigError(f"speed must be above 0, not {speed}")
    requests: list[SimRequest] = []
    start: datetime | None = None
    for source, row in _rows(path):
        if len(requests) == limit:
            break
        time = _time(source, row)
        start = start or time
        if time < start:
            raise ConfigError(f"{source}: {TIME} must not lie before the first line's")
        prompt, output = _count(source, row, PROMPT, 1), max(1, _count(source, row, OUTPUT, 0))
        clipped_prompt = min(prompt, max_prompt_len or prompt)
        clipped_output = min(output, max_output_len or output)
        if is_clipping or (clipped_prompt, clipped_output) == (prompt, output):
            arrival_s = (time - start) / timedelta(seconds=1) / speed
            requests.append(SimRequest(arrival_s, clipped_prompt, clipped_output))
    return requests


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each row with what an error calls it."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path}, line 1: the column {missing[0]} is missing; needed are {', '.join(COLUMNS)}"
                )
            for row in reader:
                yield f"{path}, line {reader.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _time(source: str, row: Mapping[str, str]) -> datetime:
    text = row[TIME] or ""
    # datetime reads six digits of a second's fraction, the traces have seven
    whole, _, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{(fraction or '0')[:6]:0<6}")
    except ValueError:
        raise ConfigError(f"{source}: {TIME} must be like 2023-11-16 18:15:46.680590, not {text!r:.100}") from None


def _count(source: str, row: Mapping[str, str], column: str, minimum: int) -> int:
    text = row[column] or ""
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{source}: {column} must be a whole number of at least {minimum}, not {text!r:.100}")
    return int(text)
