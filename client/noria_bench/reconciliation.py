"""The client's ledger against the server's counters: whether both saw the same requests and the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from noria_bench.engine_counters import EngineCounters, metric_name
from noria_bench.records import Outcome, RequestRecord


def mismatches(records: Sequence[RequestRecord], grown: EngineCounters) -> tuple[str, ...]:
    """Each disagreement in words; none is good.

    records: of all requests that were sent between the two scrapes, each with one answer. A request that the client
    left may have ended by itself just before; what was broken off may have drawn more tokens than the client saw;
    and what Triton's own queue refuses never reaches the engine; a client that runs out of time itself cancels. Nothing
    else may differ.
    """
    num = {outcome: sum(record.outcome is outcome for record in records) for outcome in Outcome}
    num_finished, num_left = num[Outcome.FINISHED], num[Outcome.CANCELLED] + num[Outcome.ABORTED]
    num_tokens = sum(record.num_output_tokens for record in records)
    # what, the least and the most that the server may have counted, what it counted, its counter
    rows = [
        ("finished", num_finished, num_finished + num_left, grown.requests_finished, "requests_finished"),
        ("cancelled", 0, num_left + num[Outcome.EXPIRED], grown.requests_cancelled, "requests_cancelled"),
        ("rejected", 0, num[Outcome.REJECTED], grown.requests_rejected, "requests_rejected"),
        ("expired", 0, num[Outcome.EXPIRED], grown.requests_expired, "requests_expired"),
    ]
    found = [
        f"{what} requests: {_range(low, high)} by the client, {server:g} by {metric_name(name)}"
        for what, low, high, server, name in rows
        if not low <= server <= high
    ]
    most_tokens = num_tokens if num_finished == len(records) else math.inf
    if not num_tokens <= grown.generation_tokens <= most_tokens:
        counted = f"{grown.generation_tokens:g} by {metric_name('generation_tokens')}"
        found.append(f"output tokens: {num_tokens} by the client, {counted}")
    num_ended = grown.requests_finished + grown.requests_cancelled
    if num_left and not found and num_ended != num_finished + num_left:
        found.append(f"finished or cancelled: {num_finished + num_left} by the client, {num_ended:g} by the server")
    return tuple(found)


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
