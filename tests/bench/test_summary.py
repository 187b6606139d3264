"""What is reported of a run: who counts in a rate, a percentile, and goodput's denominator."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.errors import BenchError
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.results import (
    Capacity,
    GeneratorHealth,
    Result,
    Run,
    SeriesPoint,
    read_records,
    read_result,
    read_series,
    requests_path,
    series_path,
    write_lines,
    write_result,
)
from noria_bench.slo import Objectives
from noria_bench.summary import Summary, summarise_requests, summarise_server


def answered(index=0, ttft_s=1.0, gaps_s=(0.1, 0.3), request_class="default", **changes):
    """Sent at 10 s, with a token after ttft_s and one after each gap."""
    times = [10 + ttft_s]
    for gap in gaps_s:
        times.append(times[-1] + gap)
    chunks = tuple(Chunk(time, 1) for time in times)
    values = {"num_input_tokens": 7, "request_class": request_class} | changes
    return RequestRecord(index, 10.0, times[-1], chunks=chunks, **values)


def failed(outcome, error="no", **changes):
    return RequestRecord(9, 10.0, 10.5, 0, (), error, outcome, **changes)


def test_latencies_of_a_record():
    record = answered()
    assert record.ttft_s == pytest.approx(1.0)
    assert record.tpot_s == pytest.approx(0.2)
    assert record.max_gap_s == pytest.approx(0.3)
    assert record.e2e_s == pytest.approx(1.4)
    assert failed(Outcome.REJECTED).ttft_s is None


def test_tpot_is_per_token_where_a_chunk_brings_several():
    record = RequestRecord(0, 10.0, 12.0, 3, (Chunk(11.0, 1), Chunk(12.0, 4)))
    assert record.tpot_s == pytest.approx(0.25)
    assert record.gaps_s == [1.0]
    # in one piece there is no time between tokens; it was 0
    assert RequestRecord(0, 10.0, 12.0, 3, (Chunk(12.0, 5),)).tpot_s is None


def test_failures_stand_in_goodputs_denominator_and_intended_cancels_do_not():
    """Dropping late requests must not raise goodput."""
    records = [
        answered(0),
        answered(1, ttft_s=5.0),
        failed(Outcome.REJECTED),
        failed(Outcome.EXPIRED),
        failed(Outcome.FAILED),
        failed(Outcome.ABORTED),
        failed(Outcome.CANCELLED, error=None),
    ]
    summed, classes = summarise_requests(records, {"default": Objectives(ttft_s=2.0)})
    assert summed.good_share == pytest.approx(1 / 6)
    assert summed.outcomes == {
        "finished": 2,
        "rejected": 1,
        "expired": 1,
        "failed": 1,
        "aborted": 1,
        "cancelled": 1,
    }
    assert (summed.num_requests, summed.num_finished, summed.num_errors) == (7, 2, 4)
    assert summed.errors == {"no": 4}
    assert classes == {"default": summed}


def test_rates_are_of_finished_requests_over_the_whole_time():
    summed, _ = summarise_requests([answered(0), failed(Outcome.FAILED)], {})
    assert summed.wall_s == pytest.approx(1.4)
    assert summed.output_tokens_per_s == pytest.approx(3 / 1.4)
    assert summed.input_tokens_per_s == pytest.approx(7 / 1.4)
    assert summed.good_share is None


def test_classes_keep_their_own_objectives():
    records = [answered(0, request_class="chat"), answered(1, request_class="batch")]
    objectives = {"chat": Objectives(tpot_s=0.1), "batch": Objectives(tpot_s=1.0)}
    summed, classes = summarise_requests(records, objectives)
    assert {name: one.good_share for name, one in classes.items()} == {"batch": 1.0, "chat": 0.0}
    assert summed.good_share == 0.5
    # a class without objectives cannot be judged, nor can all together
    assert summarise_requests(records, {"chat": Objectives()})[0].good_share is None


def test_warm_up_is_left_out():
    summed, _ = summarise_requests([answered(0, ttft_s=100.0, is_warm_up=True), answered(1)], {})
    assert summed.num_requests == 1
    assert summed.ttft_s is not None
    assert summed.ttft_s.median == pytest.approx(1.0)


def test_icl_pools_gaps_and_tpot_does_not():
    records = [answered(0, gaps_s=[0.1] * 99), answered(1, gaps_s=[0.5])]
    summed, _ = summarise_requests(records, {})
    assert summed.icl_s is not None
    assert summed.icl_s.median == pytest.approx(0.1)
    assert summed.tpot_s is not None
    assert summed.tpot_s.median == pytest.approx(0.3)


def test_nothing_at_all():
    summed, classes = summarise_requests([], {"default": Objectives()})
    assert (summed.num_requests, summed.wall_s, summed.output_tokens_per_s, summed.ttft_s) == (0, 0.0, None, None)
    assert classes == {}


def result_of(*runs):
    return Result(
        command=["noria", "bench"],
        created_at="2026-01-01T00:00:00+00:00",
        arguments={"bench": {"seed": 1}},
        workload={"sha256": "abc"},
        slo={"default": "ttft_p95=2"},
        environment={"num_cores": 2},
        runs=runs,
        capacities=[Capacity("inflight", "ttft_p95=2", 0.4, 0.3, 0.5, True, "ttft_p95", 7)],
    )


def run_of(records):
    summed, classes = summarise_requests(records, {"default": Objectives(ttft_s=2.0)})
    server = summarise_server(EngineCounters(steps=2, slot_steps=8, useful_slot_steps=4), Distribution(1, 2, 3), [0.5])
    health = GeneratorHealth(0.1, 0.2, 0.01, 0.3, ("late",), -10)
    return Run(
        "inflight-0", "inflight", 0, 1, 0.5, None, "now", Summary(summed, classes, server), health, mismatches=("x",)
    )


def test_a_result_survives_its_files(tmp_path):
    records = [answered(0, due_s=9.5), failed(Outcome.REJECTED)]
    points = [SeriesPoint(1.0, 2, 3, 0.4, 5)]
    result = result_of(run_of(records))
    write_result(tmp_path, result)
    write_lines(requests_path(tmp_path, "inflight-0"), (record.to_json() for record in records))
    write_lines(series_path(tmp_path, "inflight-0"), (asdict(point) for point in points))
    assert read_result(tmp_path).to_json() == result.to_json()
    assert read_result(tmp_path / "result.json").runs == list(result.runs)
    assert not read_result(tmp_path).runs[0].is_valid
    assert [record.to_json() for record in read_records(tmp_path, "inflight-0")] == [r.to_json() for r in records]
    assert read_series(tmp_path, "inflight-0") == points
    assert read_records(tmp_path, "another") == []


def test_equal_records_give_equal_files(tmp_path):
    for name in ("a", "b"):
        write_lines(requests_path(tmp_path, name), [answered().to_json()])
    assert requests_path(tmp_path, "a").read_bytes() == requests_path(tmp_path, "b").read_bytes()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot read"),
        ("[]", "holds no JSON object"),
        ("{}", "format must be 'noria-bench-1', not None"),
        (json.dumps({"format": "noria-bench-1"}), "not a result of noria bench"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, text, reason):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(BenchError, match=reason):
        read_result(tmp_path)


def test_a_damaged_record_is_named(tmp_path):
    write_lines(requests_path(tmp_path, "a"), [{"index": 1}])
    with pytest.raises(BenchError, match="not a request's record: KeyError"):
        read_records(tmp_path, "a")
