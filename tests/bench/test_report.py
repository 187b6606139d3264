"""The arithmetic of a report, on records made by hand."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.records import Chunk, RequestRecord
from noria_bench.report import comparison_table, summarise

COUNTERS = EngineCounters(
    steps=10,
    slot_steps=80,
    useful_slot_steps=60,
    rows=75,
    kv_allocated_slot_steps=1000,
    kv_live_slot_steps=970,
    preemptions=2,
)


def record(index, sent_s, chunks, error=None):
    chunks = tuple(Chunk(*chunk) for chunk in chunks)
    return RequestRecord(index, sent_s, chunks[-1].time_s if chunks else sent_s, 5, chunks, error)


def test_latencies_of_one_request():
    one = record(0, 10.0, [(10.5, 1), (11.0, 2), (12.5, 2)])
    assert one.num_output_tokens == 5
    assert (one.ttft_s, one.e2e_s) == (0.5, 2.5)
    assert one.tpot_s == 2.0 / 4


def test_latencies_that_a_request_cannot_have():
    assert record(0, 10.0, [(10.5, 1)]).tpot_s is None
    nothing = record(0, 10.0, [])
    assert (nothing.ttft_s, nothing.tpot_s, nothing.e2e_s) == (None, None, None)


def test_percentiles_interpolate_linearly():
    assert Distribution.of([4.0, None, 1.0, 3.0, 2.0, 5.0]) == pytest.approx(Distribution(3.0, 4.8, 4.96))
    assert Distribution.of([7.0]) == Distribution(7.0, 7.0, 7.0)
    assert Distribution.of([None]) is None


def test_summary():
    records = [
        record(0, 0.0, [(1.0, 1), (2.0, 3)]),
        record(1, 0.5, [(1.0, 2), (5.0, 4)]),
        # its tokens were not useful, but its time was spent
        record(2, 0.0, [(10.0, 100)], error="INTERNAL: broken"),
    ]
    result = summarise("static", 4, records, COUNTERS)
    assert result.useful_output_tokens_per_s == (4 + 6) / 10.0
    assert (result.slot_utilisation, result.mean_batch) == (0.75, 7.5)
    assert result.kv_waste == pytest.approx(0.03)
    assert result.ttft_s.median == 0.75
    assert result.e2e_s.median == (2.0 + 4.5) / 2
    assert result.tpot_s.median == pytest.approx((1 / 3 + 4 / 5) / 2)
    assert (result.num_requests, result.num_succeeded, result.num_errors) == (4, 2, 1)
    assert result.errors == {"INTERNAL: broken": 1}


def test_json_form():
    result = json.loads(
        json.dumps(summarise("inflight", 1, [record(0, 0.0, [(1.0, 1), (2.0, 1)])], COUNTERS).to_json())
    )
    assert result["mode"] == "inflight"
    assert result["ttft_s"] == {"median": 1.0, "p95": 1.0, "p99": 1.0}
    needed = {"useful_output_tokens_per_s", "slot_utilisation", "mean_batch", "kv_waste", "tpot_s", "e2e_s"}
    assert needed <= result.keys()


def test_summary_of_nothing():
    result = summarise("static", 4, [], None, is_interrupted=True)
    assert (result.useful_output_tokens_per_s, result.ttft_s, result.slot_utilisation) == (None, None, None)
    assert "static (interrupted)" in rendered([result])


def rendered(results):
    console = Console(width=120, file=StringIO())
    console.print(comparison_table(results))
    return console.file.getvalue()


def test_table_shows_modes_ratio_and_errors():
    slow = summarise("static", 1, [record(0, 0.0, [(1.0, 1), (4.0, 1)])], COUNTERS)
    fast = summarise("inflight", 2, [record(0, 0.0, [(1.0, 3)]), record(1, 0.0, [], "INTERNAL: [x]")], COUNTERS)
    lines = {line.split("│")[1].strip(): line for line in rendered([slow, fast]).splitlines() if "│" in line}
    assert "0.5" in lines["useful output tokens/s"]
    assert "3.0" in lines["useful output tokens/s"]
    assert "6.00" in lines["tokens/s, times static"]
    assert "75.0%" in lines["slot utilisation"]
    assert "0 │" in lines["INTERNAL: [x]"]
    assert "1 │" in lines["INTERNAL: [x]"]
