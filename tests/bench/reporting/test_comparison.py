"""Ratios by hand, and by what right they have an interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.reporting.comparison import comparisons_of
from noria_bench.reporting.figures import LATENCIES
from noria_bench.reporting.intervals import paired_ratio
from noria_bench.reporting.loaded import load_sources
from noria_bench.reporting.ratio import ratio_points, ratio_table
from noria_bench.reporting.resample import Resample
from noria_bench.results import write_result
from support.bench_results import health, with_run, write_bench_result

SIZE = {"num_requests": 24, "lengths": (4, 8, 16, 40)}


def rows_of(comparison):
    return {row.figure.key: row for row in comparison.rows}


def record(index, ttft_s, outcome=Outcome.FINISHED):
    return RequestRecord(index, 0.0, ttft_s + 1, 5, (Chunk(ttft_s, 1), Chunk(ttft_s + 1, 1)), None, outcome)


def test_repeats_of_the_same_requests_are_paired(tmp_path):
    write_bench_result(tmp_path / "r", modes=["static", "inflight"], num_repeats=3, **SIZE)
    [source] = load_sources([tmp_path / "r"])
    [comparison] = comparisons_of([source])
    assert (comparison.base, comparison.other, comparison.notes) == ("static", "in-flight", ())
    row = rows_of(comparison)["output_tokens_per_s"]
    static, inflight = (
        [run.summary.all.output_tokens_per_s for run in source.result.runs if run.label == label]
        for label in ("static", "inflight")
    )
    assert row.method == "t, 3 paired repeats"
    assert row.ratio == paired_ratio(static, inflight)
    assert (row.base, row.other) == pytest.approx((np.mean(static), np.mean(inflight)))
    assert row.verdict == "better"
    assert rows_of(comparison)["ttft_median_s"].verdict == "better"
    assert rows_of(comparison)["ttft_median_s"].ratio.value < 1


def test_a_single_pair_is_compared_request_by_request(tmp_path):
    write_bench_result(tmp_path / "r", modes=["static", "inflight"], **SIZE)
    [comparison] = comparisons_of(load_sources([tmp_path / "r"]))
    rows = rows_of(comparison)
    assert rows["ttft_median_s"].method == "bootstrap, 24 paired requests"
    assert rows["e2e_p95_s"].verdict == "better, in these runs"
    # a single run says nothing of how throughput varies
    assert rows["output_tokens_per_s"].method == "none: too few repeats"
    assert rows["output_tokens_per_s"].verdict == "no interval"


def test_only_runs_that_have_their_counterpart_are_compared(tmp_path):
    """It was so that a mean over two repeats stood against one of them, which had sent other requests."""
    result = write_bench_result(tmp_path / "r", modes=["static", "inflight"], num_repeats=2, **SIZE)
    assert result.runs[3].name == "inflight-1"
    write_result(tmp_path / "r", with_run(result, 3, generator=health(("too slow",))))
    [comparison] = comparisons_of(load_sources([tmp_path / "r"]))
    row = rows_of(comparison)["output_tokens_per_s"]
    assert row.base == result.runs[0].summary.all.output_tokens_per_s
    assert row.other == result.runs[1].summary.all.output_tokens_per_s
    assert [note.partition(" runs")[0] for note in comparison.notes] == ["static: 1 of 2", "in-flight: 1 of 2"]


def test_two_results_are_compared_label_by_label(tmp_path):
    write_bench_result(tmp_path / "before", num_repeats=2, **SIZE)
    write_bench_result(tmp_path / "after", num_repeats=2, pace=0.5, **SIZE)
    comparisons = comparisons_of(load_sources([tmp_path / "before", tmp_path / "after"]))
    assert [(one.base, one.other) for one in comparisons] == [
        (f"before: {label}", f"after: {label}") for label in ("static", "dynamic", "in-flight")
    ]
    for comparison in comparisons:
        # the same drift on both sides: the pairs differ by the pace alone
        row = rows_of(comparison)["e2e_median_s"]
        assert (row.ratio.low, row.ratio.value, row.ratio.high) == pytest.approx((0.5, 0.5, 0.5))
        assert row.verdict == "better"
        assert rows_of(comparison)["slot_utilisation"].verdict == "no difference shown"


def test_other_workloads_are_not_paired(tmp_path):
    result = write_bench_result(tmp_path / "a", modes=["inflight"], num_repeats=2, **SIZE)
    write_bench_result(tmp_path / "b", modes=["inflight"], num_repeats=2, sha256="0" * 64, **SIZE)
    write_result(tmp_path / "a", replace(result, environment=result.environment | {"packages": {"torch": "1.0"}}))
    [comparison] = comparisons_of(load_sources([tmp_path / "a", tmp_path / "b"]))
    rows = rows_of(comparison)
    assert rows["ttft_p95_s"].method == "bootstrap, 48 and 48 requests"
    assert rows["output_tokens_per_s"].method == "t, 2 and 2 repeats"
    assert "workloads differ" in comparison.notes[0]
    assert any("packages.torch: 1.0, now 2.13.0" in note for note in comparison.notes)


def test_a_figure_of_zero_has_no_ratio(tmp_path):
    write_bench_result(tmp_path / "r", modes=["static", "inflight"], num_requests=8, lengths=(2,), num_repeats=2)
    [source] = load_sources([tmp_path / "r"])
    runs = [
        replace(run, summary=replace(run.summary, all=replace(run.summary.all, good_share=0.0)))
        for run in source.result.runs
    ]
    write_result(tmp_path / "r", replace(source.result, runs=runs))
    row = rows_of(comparisons_of(load_sources([tmp_path / "r"]))[0])["good_share"]
    assert (row.base, row.ratio, row.verdict) == (0.0, None, "no interval")


def test_resampled_percentiles_are_numpys():
    rng = np.random.default_rng(0)
    base = [record(index, float(value)) for index, value in enumerate(rng.exponential(1, 200))]
    other = [record(index, 2 * one.ttft_s) for index, one in enumerate(base)]
    paired, free = (Resample(base, other, is_paired) for is_paired in (True, False))
    first, second, estimate = paired.ratio(LATENCIES["ttft"], 95)
    assert first == pytest.approx(np.percentile([one.ttft_s for one in base], 95))
    assert second == pytest.approx(2 * first)
    # the same requests on both sides: nothing is left to chance
    assert (estimate.low, estimate.high) == pytest.approx((2, 2))
    low, high = (getattr(free.ratio(LATENCIES["ttft"], 95)[2], name) for name in ("low", "high"))
    assert low < 1.8
    assert high > 2.2


def test_requests_that_did_not_finish_are_not_drawn():
    base = [record(index, 1.0) for index in range(4)]
    other = [record(0, 2.0), record(1, 2.0), record(2, 9.0, Outcome.FAILED)]
    resample = Resample(base, other, is_paired=True)
    assert resample.method == "bootstrap, 2 paired requests"
    assert resample.ratio(LATENCIES["ttft"], 50)[2].value == 2.0


def test_an_index_of_two_repeats_pairs_nothing():
    base = [record(0, 1.0), record(0, 3.0)]
    assert Resample(base, base, is_paired=True).method == "bootstrap, 2 and 2 requests"


def test_measured_ratios_stand_beside_the_predicted_ones(tmp_path):
    for name, lengths in (("even", (32,)), ("uneven", (8, 8, 8, 104))):
        write_bench_result(
            tmp_path / name, num_requests=64, lengths=lengths, num_repeats=2, sha256=f"{len(lengths)}" * 64
        )
    points = ratio_points(load_sources([tmp_path / "uneven", tmp_path / "even"]))
    by_key = {(point.source, point.label): point for point in points}
    assert by_key["even", "inflight"].predicted == 1
    assert by_key["even", "inflight"].tokens.value == pytest.approx(1, abs=0.1)
    uneven = by_key["uneven", "inflight"]
    # three of four are 8, so a batch of eight is nearly always as long as its longest, 104: 104 / 32 less a little
    assert uneven.predicted == pytest.approx(104 / 32 * (1 - 0.75**8 * 96 / 104), rel=0.03)
    assert uneven.x == pytest.approx(np.std([8, 8, 8, 104]) / 32)
    # the end of 64 requests and faster small batches aside
    assert uneven.slots == pytest.approx(uneven.predicted, rel=0.25)
    assert by_key["uneven", "dynamic"].predicted == 1
    table = ratio_table(points)
    assert [row[0] for row in table.rows] == ["even", "even", "uneven", "uneven"]


def test_no_ratio_at_a_rate_that_all_keep_up_with(tmp_path):
    write_bench_result(tmp_path / "r", rates=(0.1,), num_requests=8, lengths=(4,))
    assert ratio_points(load_sources([tmp_path / "r"])) == []
