"""The client's ledger against the server's counters: agreement is silent, anything else is said."""

from __future__ import annotations

import math

import pytest

from noria_bench.engine_counters import EngineCounters
from noria_bench.histogram import Histogram
from noria_bench.reconciliation import mismatches
from noria_bench.records import Chunk, Outcome, RequestRecord


def record(outcome, num_tokens=0):
    error = None if outcome in (Outcome.FINISHED, Outcome.CANCELLED) else "no"
    return RequestRecord(0, 0.0, 1.0, 3, tuple(Chunk(0.5, 1) for _ in range(num_tokens)), error, outcome)


MIXED = [
    record(Outcome.FINISHED, 5),
    record(Outcome.FINISHED, 4),
    record(Outcome.CANCELLED, 2),
    record(Outcome.REJECTED),
    record(Outcome.EXPIRED, 1),
    record(Outcome.FAILED),
]


def counted(**changes):
    values = {
        "requests_finished": 2,
        "requests_cancelled": 1,
        "requests_rejected": 1,
        "requests_expired": 1,
        "generation_tokens": 14,
    }
    return EngineCounters(**values | changes)


def test_agreement():
    assert mismatches(MIXED, counted()) == ()
    # it had ended just before the cancel came
    assert mismatches(MIXED, counted(requests_finished=3, requests_cancelled=0)) == ()
    # Triton's own queue refused it
    assert mismatches(MIXED, counted(requests_rejected=0, requests_expired=0)) == ()
    whole = [record(Outcome.FINISHED, 5)]
    assert mismatches(whole, EngineCounters(requests_finished=1, generation_tokens=5)) == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requests_finished": 1}, "finished requests: 2 to 3 by the client, 1 by noria_requests_finished_total"),
        ({"requests_finished": 4}, "finished requests: 2 to 3 by the client, 4 by noria_requests_finished_total"),
        ({"requests_cancelled": 3}, "cancelled requests: 0 to 2 by the client, 3 by noria_requests_cancelled_total"),
        ({"requests_cancelled": 0}, "finished or cancelled: 3 by the client, 2 by the server"),
        ({"requests_rejected": 2}, "rejected requests: 0 to 1 by the client, 2 by noria_requests_rejected_total"),
        ({"requests_expired": 5}, "expired requests: 0 to 1 by the client, 5 by noria_requests_expired_total"),
        ({"generation_tokens": 11}, "output tokens: 12 by the client, 11 by noria_generation_tokens_total"),
    ],
)
def test_disagreement_is_said(changes, said):
    assert mismatches(MIXED, counted(**changes)) == (said,)


def test_tokens_agree_exactly_where_all_finished():
    whole = [record(Outcome.FINISHED, 5)]
    (said,) = mismatches(whole, EngineCounters(requests_finished=1, generation_tokens=6))
    assert said == "output tokens: 5 by the client, 6 by noria_generation_tokens_total"


def test_percentiles_of_a_histogram_are_those_of_prometheus():
    histogram = Histogram({1.0: 50.0, 2.0: 90.0, math.inf: 100.0})
    assert histogram.quantile(0.5) == pytest.approx(1.0)
    assert histogram.quantile(0.7) == pytest.approx(1.5)
    # beyond the last bound nothing is known
    assert histogram.quantile(0.99) == 2.0
    assert (histogram - histogram).distribution() is None
    assert (histogram - Histogram({1.0: 50.0, 2.0: 50.0, math.inf: 50.0})).quantile(0.4) == pytest.approx(1.5)
