"""Recorded requests as the simulator takes them; `noria_bench.traces` reads the files."""

from __future__ import annotations

from pathlib import Path

from noria.errors import ConfigError
from noria.simulation.requests import SimRequest
from noria_bench.errors import BenchError
from noria_bench.traces import MOONCAKE_BLOCK_TOKENS, TIMED_FORMATS, TraceRow, read_trace


def read_trace_requests(path: Path, *, speed: float = 1.0, limit: int | None = None) -> list[SimRequest]:
    """The first `limit` requests of a trace with lengths and times; the first of all arrives at 0.

    speed: 2 makes the same arrivals come twice as fast. Prompts share what the trace says that they share.
    Raises ConfigError naming the line and the column.
    """
    if not speed > 0:
        raise ConfigError(f"speed must be above 0, not {speed}")
    return [_request(index, row, path, speed) for index, row in enumerate(read_rows(path)[:limit])]


def read_rows(path: Path) -> list[TraceRow]:
    """Raises ConfigError."""
    try:
        return read_trace(path)
    except BenchError as error:
        raise ConfigError(str(error)) from None


def _request(index: int, row: TraceRow, path: Path, speed: float) -> SimRequest:
    if row.arrival_s is None or row.num_prompt_tokens is None or row.num_output_tokens is None:
        raise ConfigError(f"{path} must say how long prompts are and when they came, as {', '.join(TIMED_FORMATS)} do")
    return SimRequest(
        row.arrival_s / speed,
        row.num_prompt_tokens,
        row.num_output_tokens,
        prompt_token_ids=_prompt(index, row, row.num_prompt_tokens) if row.hash_ids else None,
    )


def _prompt(index: int, row: TraceRow, num_tokens: int) -> tuple[int, ...]:
    """Equal ids for blocks of equal hash; what no hash covers is as in no other request."""
    blocks = (hash_id for hash_id in row.hash_ids for _ in range(MOONCAKE_BLOCK_TOKENS))
    token_ids = [2 * hash_id for _, hash_id in zip(range(num_tokens), blocks, strict=False)]
    return tuple(token_ids + [2 * index + 1] * (num_tokens - len(token_ids)))
