"""Each study, on a reduced size, has the shape that papers and issues report; what is drawn and written of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from noria.cli import main
from noria.simulation.studies import autoscaling, eviction, preemptions, presets, sarathi
from noria.simulation.studies.plots import draw_study
from noria.simulation.studies.ratio import LAWS, NUM_DRAWS, ideal_ratio, ratio_points, simulated_ratios
from noria.simulation.studies.report import to_json, to_markdown
from noria.simulation.studies.roofline import roofline_study
from noria.simulation.studies.study import Mark, Panel, Series, Study
from noria_bench.lengths import ConstantLength, EmpiricalLength, UniformLength, draw_lengths


@pytest.mark.parametrize(
    ("law", "batch_size", "ratio"),
    [
        ("constant", 64, 1.00),
        ("uniform ±50 %", 4, 1.30),
        ("uniform ±50 %", 64, 1.49),
        ("Orca: uniform 1-128", 8, 1.77),
        ("Anyscale: cap 32", 16, 1.93),
        ("Anyscale: cap 128", 32, 2.25),
        ("Anyscale: cap 512", 8, 2.53),
        ("Anyscale: cap 1536", 16, 3.40),
        ("Anyscale: cap 1536", 64, 4.74),
        ("lognormal, CV 2", 16, 5.44),
    ],
)
def test_ratio_predicts_the_table(law: str, batch_size: int, ratio: float) -> None:
    assert ideal_ratio(draw_lengths(LAWS[law], NUM_DRAWS, seed=1), batch_size) == pytest.approx(ratio, rel=0.03)


def test_ratio_of_two_lengths_by_hand() -> None:
    # of two draws from 1 and 3 the larger is 1 in a quarter of the cases
    assert ideal_ratio([1, 3], 2) == pytest.approx((0.25 * 1 + 0.75 * 3) / 2)


def test_ratio_in_the_scheduler_is_as_predicted_and_1_for_one_length() -> None:
    points = ratio_points({"constant": ConstantLength(20), "Orca": UniformLength(1, 128)}, (8,), num_batches=20)
    constant, orca = (point for point in points if point.simulated is not None)
    assert constant.simulated == constant.simulated_makespan == constant.predicted == 1.0
    assert orca.simulated == pytest.approx(orca.predicted, rel=0.06)
    # while the last long outputs run, slots are free
    assert orca.simulated_makespan is not None
    assert 1.5 < orca.simulated_makespan < orca.predicted


def test_ratio_of_a_trace_comes_from_its_own_lengths() -> None:
    (point, *_) = ratio_points({"trace": EmpiricalLength([10, 10, 40])}, (), num_batches=1)
    assert (point.mean, point.predicted) == (20, pytest.approx(ideal_ratio([10, 10, 40], 4)))


def test_simulated_ratio_by_hand() -> None:
    # static: 4 + 4 steps; continuous: the 1s share a slot beside the 4s. Until the last joins, 2 tokens a step
    waiting, makespan = simulated_ratios([4, 1, 1, 4], 2)
    assert (waiting, makespan) == (2 / (10 / 8), 8 / 6)


def test_a_larger_chunk_budget_lengthens_the_gaps_and_shortens_the_wait() -> None:
    points = sarathi.budget_points((256, 512, 4096), sarathi.workload(80))
    for batching in ("mixed", "separate"):
        small, middle, large = (p for p in points if p.prefill_batching == batching and p.prompts == "chunks")
        assert small.icl_p99_s < middle.icl_p99_s < large.icl_p99_s / 2
        assert small.ttft_p50_s > middle.ttft_p50_s


def test_mixing_helps_the_wait_and_chunks_the_gaps_and_both_help_both() -> None:
    points = sarathi.budget_points((512,), sarathi.workload(80))
    both, mixed_only, chunks_only, neither = points
    assert mixed_only.ttft_p50_s < chunks_only.ttft_p50_s
    assert chunks_only.icl_p99_s < mixed_only.icl_p99_s < neither.icl_p99_s
    assert both.icl_p99_s < chunks_only.icl_p99_s
    assert both.ttft_p50_s < 1.5 * mixed_only.ttft_p50_s


def test_evicting_trades_gaps_for_the_wait_and_nothing_without_pressure() -> None:
    requests = eviction.mixed_workload(34)
    reserved, recomputed, swapped = (eviction.eviction_point("", p, 0.4, requests) for p in eviction.SWEPT)
    assert recomputed.ttft_p50_s < 0.9 * reserved.ttft_p50_s
    assert recomputed.tpot_p99_s > 1.3 * reserved.tpot_p99_s
    assert recomputed.max_gap_p99_s > 5 * reserved.max_gap_p99_s
    assert reserved.num_preemptions == 0 < recomputed.num_preemptions
    assert recomputed.num_recomputed_tokens > 0 == swapped.num_recomputed_tokens
    assert swapped.output_tokens_per_s >= recomputed.output_tokens_per_s
    ample = [eviction.eviction_point("", policy, 1.5, requests[:12]) for policy in eviction.SWEPT]
    assert len({(point.output_tokens_per_s, point.tpot_p99_s) for point in ample}) == 1


def test_evicting_long_prompts_without_headroom_loses_output() -> None:
    requests = eviction.issue_workload(32)
    share = eviction.ISSUE_NUM_FITTING / eviction.CONCURRENCY
    reserved, bare, usual = (
        eviction.eviction_point("", policy, share, requests)
        for policy in (eviction.RESERVING, eviction.BARE, eviction.RECOMPUTING)
    )
    assert bare.output_tokens_per_s < 0.99 * reserved.output_tokens_per_s
    assert bare.tpot_p99_s > 1.3 * reserved.tpot_p99_s
    assert usual.num_preemptions == 0 < bare.num_preemptions


def test_preemptions_are_rare_mostly_single_and_fewer_with_headroom() -> None:
    requests = preemptions.workload(150)
    none, usual, ample = (preemptions.preemption_point(1000, headroom, requests) for headroom in (0.0, 0.01, 0.05))
    assert none.preempted_share > usual.preempted_share > ample.preempted_share
    assert len(none.times) <= 4
    assert none.times[0] > 0.8 * sum(none.times)


def test_presets_differ_as_their_rules_do() -> None:
    rate = 40.0
    requests = presets.workload(100, rate)
    points = {name: presets.preset_point(name, rate, requests) for name in ("vllm", "trtllm", "tgi")}
    # reserving what clients ask for keeps slots empty; pausing decodes for prompts costs more
    assert points["vllm"].mean_batch > points["trtllm"].mean_batch
    assert points["vllm"].ttft_p95_s < points["trtllm"].ttft_p95_s < points["tgi"].ttft_p95_s
    assert points["tgi"].output_tokens_per_s < points["trtllm"].output_tokens_per_s


def test_roofline_of_7b_in_half_precision_on_an_h100() -> None:
    points = {(point.batch_size, point.context): point for point in roofline_study().points}
    alone = points[1, 128]
    assert alone.step_s == pytest.approx(4.1e-3, rel=0.05)
    assert alone.tokens_per_s == pytest.approx(245, rel=0.05)
    assert alone.arithmetic_share < 0.01
    # one read of the weights is shared until others bound the step, the earlier the longer the context
    assert points[8, 128].tokens_per_s > 7 * alone.tokens_per_s
    assert (points[128, 128].bound, points[16, 2048].bound) == ("weights", "kv")
    assert points[512, 2048].tokens_per_s < 1.1 * points[256, 2048].tokens_per_s


def test_scaling_on_load_keeps_what_scaling_on_the_queue_loses() -> None:
    requests = autoscaling.workload((0.0, 60.0, 200.0), (0.7, 0.7, 4.8))
    names = ("late: 32 wait", "early: 2,400 running tokens", "4 replicas")
    late, early, fixed = (autoscaling.scaling_point(name, autoscaling.simulate(name, requests)) for name in names)
    assert late.good_share < 0.8 < 0.95 < early.good_share <= fixed.good_share
    assert late.replica_seconds < early.replica_seconds < fixed.replica_seconds


@dataclass(frozen=True)
class Point:
    name: str
    value: float | None
    counts: tuple[int, ...] = ()


STUDY = Study(
    "example",
    "An example",
    "Nothing.",
    ("One finding.",),
    [Point("a", 1234.5), Point("b", 0.01234, (2, 3)), Point("c", None)],
    (
        Panel("lines", "x, s", "y", (Series("a", [1, 2], [3, 4]), Series("b", [1, 2], [4, 3], 1, Mark.POINTS))),
        Panel("bars", "", "%", (Series("a", ["p", "q"], [1, 2], 0, Mark.BARS), Series("b", ["p"], [3], 1, Mark.BARS))),
        Panel("rest", "x", "y", (Series("l", [1], [2], 2, Mark.LEVEL), Series("s", [1, 2], [1, 2], 3, Mark.STEPS))),
        Panel("end", "x", "y", (Series("end", [1, 2], [1, 2]),), "log2", "log", has_end_labels=True),
    ),
)


def test_a_picture_is_opaque_white_and_the_same_every_time(tmp_path: Path) -> None:
    from matplotlib.image import imread

    paths = [tmp_path / "a.svg", tmp_path / "b.svg", tmp_path / "a.png"]
    draw_study(STUDY, [paths[0], paths[2]])
    draw_study(STUDY, [paths[1]])
    assert paths[0].read_text() == paths[1].read_text()
    image = imread(paths[2])
    assert image[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert image.min() < 0.2


def test_a_report_has_the_findings_and_a_row_for_each_point() -> None:
    lines = to_markdown(STUDY, "example.svg").splitlines()
    assert lines[0] == "## An example"
    assert "- One finding." in lines
    assert "![An example](example.svg)" in lines
    assert lines[-5:] == [
        "| name | value | counts |",
        "| --- | --- | --- |",
        "| a | 1,234 |  |",
        "| b | 0.0123 | 2, 3 |",
        "| c |  |  |",
    ]
    assert json.loads(json.dumps(to_json(STUDY)))["points"][1] == {"name": "b", "value": 0.01234, "counts": [2, 3]}


def test_the_command_writes_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "study"
    assert main(["study", "roofline", "--output", str(folder)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.name for path in written] == ["roofline.svg", "roofline.png", "studies.md", "studies.json"]
    assert all(path.stat().st_size for path in written)
    assert list(json.loads((folder / "studies.json").read_text())) == ["roofline"]


def test_the_command_names_the_studies_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "rooflines", "--output", str(tmp_path)]) == 1
    assert "must be one of ratio, roofline" in capsys.readouterr().err
