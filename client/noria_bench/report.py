"""Numbers that sum up one mode's measurement, as JSON and as a table.

Percentiles interpolate linearly between the closest ranks (Hyndman and Fan 1996, type 7; NumPy's default). Latencies
and tokens are those of successful requests; failed ones are counted beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.records import RequestRecord


@dataclass(frozen=True)
class ModeResult:
    """One batching mode under one workload. None where nothing was measured.

    useful_output_tokens_per_s: output tokens of successful requests over wall_s.
    wall_s: from the first send to the last request's end.
    slot_utilisation, mean_batch, kv_waste: see `server_metrics.EngineCounters`.
    num_requests: of the workload; num_succeeded and num_errors leave out those that an interrupt kept from being sent.
    errors: each error message with how many requests met it.
    """

    mode: str
    useful_output_tokens_per_s: float | None
    slot_utilisation: float | None
    mean_batch: float | None
    kv_waste: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    num_requests: int
    num_succeeded: int
    num_errors: int
    num_preemptions: int
    wall_s: float
    is_interrupted: bool
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    mode: str,
    num_requests: int,
    records: Sequence[RequestRecord],
    counters: EngineCounters | None,
    is_interrupted: bool = False,
) -> ModeResult:
    """counters: how much the server's grew during the measurement; None if they could not be read."""
    succeeded = [record for record in records if record.error is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    wall_s = max(r.ended_s for r in records) - min(r.sent_s for r in records) if records else 0.0
    num_tokens = sum(record.num_output_tokens for record in succeeded)
    return ModeResult(
        mode=mode,
        useful_output_tokens_per_s=num_tokens / wall_s if wall_s > 0 else None,
        slot_utilisation=counters.slot_utilisation if counters else None,
        mean_batch=counters.mean_batch if counters else None,
        kv_waste=counters.kv_waste if counters else None,
        ttft_s=Distribution.of(record.ttft_s for record in succeeded),
        tpot_s=Distribution.of(record.tpot_s for record in succeeded),
        e2e_s=Distribution.of(record.e2e_s for record in succeeded),
        num_requests=num_requests,
        num_succeeded=len(succeeded),
        num_errors=len(records) - len(succeeded),
        num_preemptions=int(counters.preemptions) if counters else 0,
        wall_s=wall_s,
        is_interrupted=is_interrupted,
        errors=errors,
    )


def comparison_table(results: Sequence[ModeResult]) -> Table:
    """One column per mode, for rich to print."""
    table = Table(title="Batching modes, same workload")
    table.add_column("")
    for result in results:
        table.add_column(result.mode + (" (interrupted)" if result.is_interrupted else ""), justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(result) for result in results))
    if len(results) > 1:
        table.add_row(f"tokens/s, times {results[0].mode}", *(_times(result, results[0]) for result in results))
    for error in dict.fromkeys(error for result in results for error in result.errors):
        table.add_row(f"[red]{_escaped(error)}", *(str(result.errors.get(error, 0)) for result in results))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _latency_rows(
    name: str, unit: float, form: str, distribution: Callable[[ModeResult], Distribution | None]
) -> list[tuple[str, Callable[[ModeResult], str]]]:
    """A row each for median, p95 and p99. unit: what a second is in the unit shown."""

    def cell(field: str) -> Callable[[ModeResult], str]:
        def text(result: ModeResult) -> str:
            values = distribution(result)
            return "-" if values is None else format(getattr(values, field) * unit, form)

        return text

    return [(f"{name}, {field}", cell(field)) for field in ("median", "p95", "p99")]


def _times(result: ModeResult, base: ModeResult) -> str:
    if not result.useful_output_tokens_per_s or not base.useful_output_tokens_per_s:
        return "-"
    return f"{result.useful_output_tokens_per_s / base.useful_output_tokens_per_s:.2f}"


def _escaped(text: str) -> str:
    """Brackets in an error are no markup."""
    return text.replace("[", r"\[")


_ROWS: tuple[tuple[str, Callable[[ModeResult], str]], ...] = (
    ("useful output tokens/s", lambda r: _number(r.useful_output_tokens_per_s, ".1f")),
    ("slot utilisation", lambda r: _number(r.slot_utilisation, ".1%")),
    ("mean batch", lambda r: _number(r.mean_batch, ".2f")),
    ("KV waste", lambda r: _number(r.kv_waste, ".1%")),
    *_latency_rows("TTFT s", 1, ".2f", lambda r: r.ttft_s),
    *_latency_rows("TPOT ms", 1000, ".0f", lambda r: r.tpot_s),
    *_latency_rows("end to end s", 1, ".2f", lambda r: r.e2e_s),
    ("wall time s", lambda r: _number(r.wall_s, ".1f")),
    ("preemptions", lambda r: str(r.num_preemptions)),
    ("requests, done / failed / all", lambda r: f"{r.num_succeeded} / {r.num_errors} / {r.num_requests}"),
)
