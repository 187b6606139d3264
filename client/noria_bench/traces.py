"""Reads recorded requests: lengths and arrivals of a production trace, or prompts that others benchmark with.

Knows nothing of tokenizers: a row that has a prompt has no count of its tokens yet.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from noria_bench.errors import BenchError

AZURE, MOONCAKE, VLLM, SHAREGPT = TRACE_FORMATS = ("azure", "mooncake", "vllm", "sharegpt")
# formats that say when requests came
TIMED_FORMATS = (AZURE, MOONCAKE)
MOONCAKE_BLOCK_TOKENS = 512
_TIME, _PROMPT, _OUTPUT = _COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    arrival_s: seconds after the first row's; None where the format has no times.
    num_prompt_tokens: None where there is a prompt. num_output_tokens: at least 1, which every engine gives; None where
        the format has an answer instead, or says nothing.
    hash_ids: of the prompt's blocks of MOONCAKE_BLOCK_TOKENS; equal ids are equal text after equal text.
    """

    arrival_s: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    prompt: str | None = None
    answer: str | None = None
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, format: str | None = None) -> list[TraceRow]:
    """In order of arrival. format: of TRACE_FORMATS; None recognises it by the content.

    azure: CSV of the Azure LLM inference traces (Patel et al., Splitwise, ISCA 2024).
    mooncake: JSONL of Qin et al., FAST 2025: timestamp in ms, input_length, output_length, hash_ids.
    vllm: JSONL of vLLM's custom dataset: prompt, and output_tokens if it is to say how long the answer is.
    sharegpt: JSON list of conversations; of each the first human turn, and the answer that follows it. Conversations
        without both are left out.
    Raises BenchError naming the line and the field.
    """
    if format is None:
        format = recognise(path)
    if format not in _READERS:
        raise BenchError(f"a trace's format must be one of {', '.join(TRACE_FORMATS)}, not {format!r}")
    try:
        rows = list(_READERS[format](path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    if not rows:
        raise BenchError(f"{path} holds no request")
    # rows that say no time keep their places
    return sorted(rows, key=lambda row: row.arrival_s or 0.0)


def recognise(path: Path) -> str:
    """The format of a trace's file, by its first line. Raises BenchError."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            # a list may be one line of gigabytes
            line = start + (file.readline() if start != "[" else "")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
    if start == "[":
        return SHAREGPT
    if start == "{":
        keys = _object(f"{path}, line 1", line).keys()
        for format, key in ((MOONCAKE, "input_length"), (VLLM, "prompt")):
            if key in keys:
                return format
    elif _TIME in line:
        return AZURE
    raise BenchError(f"{path} is no trace of a known format ({', '.join(TRACE_FORMATS)}): it begins with {line[:80]!r}")


def measured(rows: Iterable[TraceRow], count_tokens: Callable[[str], int], has_outputs: bool) -> Iterator[TraceRow]:
    """The rows with the numbers of tokens of their prompts and answers.

    has_outputs: raise BenchError for a row that does not say how long its answer is; otherwise it has one token.
    """
    for row in rows:
        prompt, output = row.num_prompt_tokens, row.num_output_tokens
        if row.prompt is not None:
            prompt = max(1, count_tokens(row.prompt))
        if output is None and row.answer is not None:
            output = max(1, count_tokens(row.answer))
        if output is None and has_outputs:
            raise BenchError(f"the prompt {row.prompt!r:.80} has no output_tokens, nor has its class")
        yield replace(row, num_prompt_tokens=prompt, num_output_tokens=output or 1)


def within(
    rows: Iterable[TraceRow], max_prompt_tokens: int | None, max_output_tokens: int | None, is_clipping: bool = True
) -> Iterator[TraceRow]:
    """The rows; a longer one is cut down to the limits if is_clipping, else left out. Lengths must be known."""
    for row in rows:
        assert row.num_prompt_tokens is not None
        assert row.num_output_tokens is not None
        prompt = min(row.num_prompt_tokens, max_prompt_tokens or row.num_prompt_tokens)
        output = min(row.num_output_tokens, max_output_tokens or row.num_output_tokens)
        if (prompt, output) == (row.num_prompt_tokens, row.num_output_tokens):
            yield row
        elif is_clipping:
            yield replace(row, num_prompt_tokens=prompt, num_output_tokens=output)


def _read_azure(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise BenchError(f"{path}, line 1: the column {missing[0]} is missing; needed are {', '.join(_COLUMNS)}")
        start: datetime | None = None
        for row in reader:
            source = f"{path}, line {reader.line_num}"
            time = _time(source, row[_TIME] or "")
            start = start or time
            _check_order(source, _TIME, time < start)
            arrival_s = (time - start) / timedelta(seconds=1)
            prompt, output = _decimal(source, row, _PROMPT, 1), _decimal(source, row, _OUTPUT, 0)
            yield TraceRow(arrival_s, prompt, max(1, output))


def _time(source: str, text: str) -> datetime:
    # datetime reads six digits of a second's fraction, the traces have seven
    whole, point, fraction = text.partition(".")
    try:
        if not point:
            return datetime.fromisoformat(whole)
        return datetime.fromisoformat(f"{whole}.{(fraction or '0')[:6]:0<6}")
    except ValueError:
        raise BenchError(f"{source}: {_TIME} must be like 2023-11-16 18:15:46.680590, not {text!r:.100}") from None


def _decimal(source: str, row: Mapping[str, str], column: str, minimum: int) -> int:
    text = row[column] or ""
    return _count(source, column, int(text) if text.isdecimal() else text, minimum)


def _read_mooncake(path: Path) -> Iterator[TraceRow]:
    start: float | None = None
    for source, line in _lines(path):
        time = line.get("timestamp")
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time):
            raise BenchError(f"{source}: timestamp must be a finite number of milliseconds, not {time!r:.100}")
        start = time if start is None else start
        _check_order(source, "timestamp", time < start)
        hash_ids = line.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(isinstance(one, int) for one in hash_ids):
            raise BenchError(f"{source}: hash_ids must be a list of whole numbers, not {hash_ids!r:.100}")
        prompt = _count(source, "input_length", line.get("input_length"), 1)
        output = _count(source, "output_length", line.get("output_length"), 0)
        yield TraceRow((time - start) / 1000, prompt, max(1, output), hash_ids=tuple(hash_ids))


def _read_vllm(path: Path) -> Iterator[TraceRow]:
    for source, line in _lines(path):
        prompt = line.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise BenchError(f"{source}: prompt must be a text, not {prompt!r:.100}")
        output = line.get("output_tokens")
        yield TraceRow(
            num_output_tokens=None if output is None else max(1, _count(source, "output_tokens", output, 0)),
            prompt=prompt,
        )


def _read_sharegpt(path: Path) -> Iterator[TraceRow]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is no JSON: {error}") from None
    if not isinstance(entries, list):
        raise BenchError(f"{path} must be a JSON list of conversations")
    for index, entry in enumerate(entries):
        try:
            turns = [(str(turn["from"]), str(turn["value"])) for turn in entry["conversations"]]
        except (KeyError, TypeError):
            raise BenchError(
                f"{path}, conversation {index}: conversations must be a list of turns with `from` and `value`"
            ) from None
        asked = next(
            (place for place, (who, text) in enumerate(turns) if who in ("human", "user") and text), len(turns)
        )
        answer = next((text for who, text in turns[asked:] if who in ("gpt", "chatgpt", "assistant") and text), None)
        if answer is not None:
            yield TraceRow(prompt=turns[asked][1], answer=answer)


_READERS: Mapping[str, Callable[[Path], Iterator[TraceRow]]] = {
    AZURE: _read_azure,
    MOONCAKE: _read_mooncake,
    VLLM: _read_vllm,
    SHAREGPT: _read_sharegpt,
}


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a JSONL file, with what an error calls it."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.isspace():
                source = f"{path}, line {number}"
                yield source, _object(source, text)


def _object(source: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BenchError(f"{source}: must be a JSON object, not {text.strip()!r:.100}")
    return value


def _count(source: str, name: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BenchError(f"{source}: {name} must be a whole number of at least {minimum}, not {value!r:.100}")
    return value


def _check_order(source: str, name: str, is_before: bool) -> None:
    if is_before:
        raise BenchError(f"{source}: {name} must not lie before the first line's")
