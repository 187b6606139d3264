"""Every figure of the engine reaches Triton's registry under its name, with its labels; a request's, the histograms."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from noria.engine.outputs import EngineStats, LevelStats
from noria.engine.request_timings import RequestTimings
from noria.sequence import FinishReason
from noria.serving.metric_names import MetricNames
from noria.serving.triton_metrics import TritonMetrics
from support.fake_pb_utils import MetricFamily, TritonError, series, total

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
LEVELS = (1, 2, 3)
# those that have a series, or several, of their own kind
COUNTERS_AND_GAUGES = [field.name for field in fields(EngineStats) if field.name != "levels"]
LEVEL_FIGURES = {
    "num_waiting": "noria_num_requests_waiting",
    "num_stopped": "noria_requests_finished_total",
    "num_at_length": "noria_requests_finished_total",
    "num_failed": "noria_requests_failed_total",
    "num_rejected": "noria_requests_rejected_total",
    "num_expired": "noria_requests_expired_total",
    "num_cancelled": "noria_requests_cancelled_total",
}
TIMINGS = RequestTimings(
    level=2,
    finish_reason=FinishReason.STOP,
    num_prompt_tokens=5,
    num_output_tokens=6,
    num_preemptions=7,
    queue_s=0.1,
    ttft_s=0.2,
    tpot_s=0.3,
    max_gap_s=0.4,
    e2e_s=0.5,
)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricFamily, "registry", {})


def names(mode: str = "inflight") -> MetricNames:
    return MetricNames("llm", "1", mode, LEVELS)


def stats(offset: int = 0) -> EngineStats:
    """Another value in every field, which `offset` raises."""
    values = {name: offset + 100 + index for index, name in enumerate(COUNTERS_AND_GAUGES)}
    return EngineStats(**values, levels=tuple(_level(level, offset) for level in LEVELS))  # type: ignore[arg-type]


def _level(level: int, offset: int) -> LevelStats:
    values = {name: offset + 1000 * level + index for index, name in enumerate(LEVEL_FIGURES)}
    # the kinds of failures are among them
    return LevelStats(level, **(values | {"num_failed": 10 * values["num_failed"]}))


def values() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (name, labels): metric.total
        for name, (_, _, family) in MetricFamily.registry.items()
        for labels, metric in family.items()
    }


@pytest.mark.parametrize("mode", ["inflight", "static", "dynamic"])
@pytest.mark.parametrize("field", COUNTERS_AND_GAUGES)
def test_each_figure_of_the_engine_moves_a_series(mode: str, field: str) -> None:
    shown_elsewhere = {"inflight": {"num_empty_slots"}, "static": set(), "dynamic": set()}
    metrics = TritonMetrics(names(mode))
    metrics.publish(EngineStats(num_kv_blocks=10**6, block_size=1, levels=stats().levels))
    before = values()
    changed = replace(EngineStats(num_kv_blocks=10**6, block_size=1, levels=stats().levels), **{field: 7 * 10**5})
    metrics.publish(changed)
    moved = {key for key, value in values().items() if value != before[key]}
    assert bool(moved) == (field not in shown_elsewhere[mode]), moved


def test_every_figure_of_a_level_is_tested_here() -> None:
    assert ["level", *LEVEL_FIGURES] == [field.name for field in fields(LevelStats)]


@pytest.mark.parametrize("field", LEVEL_FIGURES)
def test_each_figure_of_a_level_moves_its_series_in_its_class_and_in_no_other(field: str) -> None:
    metrics = TritonMetrics(names())
    first, second, third = stats().levels
    metrics.publish(replace(stats(), levels=(first, second, third)))
    before = values()
    # every kind of failure is a failure
    more = {name: getattr(second, name) + 50 for name in {field, "num_failed"}}
    metrics.publish(replace(stats(), levels=(first, replace(second, **more), third)))
    moved = {
        (name, dict(labels).get("class")) for (name, labels), value in values().items() if value != before[name, labels]
    }
    assert {(name, level) for name, level in moved if name.startswith("noria_")} == {
        (LEVEL_FIGURES[field], "2"),
        ("noria_requests_failed_total", "2"),
    }


def test_counters_grow_to_the_engines_gauges_are_set_and_what_has_not_changed_costs_no_call() -> None:
    metrics = TritonMetrics(names())
    for offset in (0, 50):
        metrics.publish(stats(offset))
        now = stats(offset)
        assert total("noria_steps_total") == now.num_steps
        assert series("noria_kv_blocks_held", model="llm", version="1", mode="inflight").total == now.num_kv_blocks_held
        waiting = [series("noria_num_requests_waiting", **{"class": str(level)}).total for level in LEVELS]
        assert waiting == [level.num_waiting for level in now.levels]
        assert total("noria_requests_failed_total") == now.num_failed
    num_calls = [metric.num_calls for _, _, family in MetricFamily.registry.values() for metric in family.values()]
    metrics.publish(stats(50))
    assert num_calls == [
        metric.num_calls for _, _, family in MetricFamily.registry.values() for metric in family.values()
    ]


def test_the_derived_gauges() -> None:
    metrics = TritonMetrics(names())
    metrics.publish(EngineStats(levels=stats().levels))
    assert total("noria_slot_utilisation") == total("noria_kv_usage") == 0.0
    metrics.publish(
        EngineStats(
            num_slot_steps=8,
            num_useful_slot_steps=6,
            num_kv_blocks=40,
            num_kv_blocks_held=10,
            block_size=4,
            num_prefix_hit_tokens=9,
            levels=stats().levels,
        )
    )
    assert total("noria_slot_utilisation") == 0.75
    assert total("noria_kv_usage") == total("vllm:kv_cache_usage_perc") == total("vllm:gpu_cache_usage_perc") == 0.25
    blocks = {
        kind: series("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind).total
        for kind in ("max", "used", "free", "tokens_per", "reused", "fraction")
    }
    assert blocks == {"max": 40, "used": 10, "free": 30, "tokens_per": 4, "reused": 2, "fraction": 0.25}


def test_no_share_of_the_cache_is_written_in_a_form_that_orca_would_misread() -> None:
    """Python and Triton write 1 / 30000 as 3.3e-05, of which a reader of plain decimals takes 3.3."""
    metrics = TritonMetrics(names())
    metrics.publish(EngineStats(num_kv_blocks=30_000, num_kv_blocks_held=1, levels=stats().levels))
    assert re.fullmatch(r"\d+(\.\d+)?", str(total("noria_kv_usage")))


def test_vllms_ends_are_all_that_were_taken_in() -> None:
    metrics = TritonMetrics(names())
    level = LevelStats(
        1, 0, num_stopped=1, num_at_length=2, num_failed=30, num_rejected=8, num_expired=9, num_cancelled=6
    )
    metrics.publish(EngineStats(levels=(level, LevelStats(2), LevelStats(3))))
    ends = {
        reason: series("vllm:request_success_total", finished_reason=reason).total
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 2, "abort": 15, "error": 7}


def test_histograms_observe_what_the_request_had_in_its_class_and_for_vllm() -> None:
    metrics = TritonMetrics(names())
    metrics.observe(TIMINGS)
    expected = {
        "queue_time_seconds": 0.1,
        "time_to_first_token_seconds": 0.2,
        "time_per_output_token_seconds": 0.3,
        "max_token_gap_seconds": 0.4,
        "e2e_request_latency_seconds": 0.5,
        "request_prompt_tokens": 5,
        "request_generation_tokens": 6,
        "request_preemptions": 7,
    }
    for name, value in expected.items():
        assert series(f"noria_{name}", **{"class": "2"}).observed == [value]
        assert series(f"noria_{name}", **{"class": "1"}).observed == []
    vllm = {
        name.removeprefix("vllm:"): metric.observed
        for name, (kind, _, family) in MetricFamily.registry.items()
        for metric in family.values()
        if kind == MetricFamily.HISTOGRAM and name.startswith("vllm:")
    }
    assert vllm == {
        "request_queue_time_seconds": [0.1],
        "time_to_first_token_seconds": [0.2],
        "time_per_output_token_seconds": [0.3],
        "request_time_per_output_token_seconds": [0.3],
        "e2e_request_latency_seconds": [0.5],
        "request_prompt_tokens": [5],
        "request_generation_tokens": [6],
    }


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR])
def test_of_a_request_without_an_answer_only_the_queue_time_is_observed(reason: FinishReason) -> None:
    metrics = TritonMetrics(names())
    metrics.observe(replace(TIMINGS, finish_reason=reason))
    metrics.observe(replace(TIMINGS, finish_reason=reason, queue_s=None))
    observed = {
        name: metric.observed
        for name, (_, _, family) in MetricFamily.registry.items()
        for metric in family.values()
        if metric.observed
    }
    assert observed == {"noria_queue_time_seconds": [0.1], "vllm:request_queue_time_seconds": [0.1]}


def test_one_token_has_no_time_between_tokens_to_observe() -> None:
    metrics = TritonMetrics(names())
    metrics.observe(replace(TIMINGS, tpot_s=None, max_gap_s=None))
    assert series("noria_time_per_output_token_seconds", **{"class": "2"}).observed == []
    assert series("noria_time_to_first_token_seconds", **{"class": "2"}).observed == [0.2]


def test_names_say_what_kind_they_are_and_each_mode_has_its_own_label() -> None:
    for mode in ("inflight", "static", "dynamic"):
        TritonMetrics(names(mode))
    for name, (kind, description, family) in MetricFamily.registry.items():
        assert (kind == MetricFamily.COUNTER) == name.endswith("_total"), name
        assert description
        for labels in map(dict, family):
            if name.startswith("noria_"):
                assert labels["mode"] in ("inflight", "static", "dynamic")
                assert (labels["model"], labels["version"]) == ("llm", "1")
            elif name.startswith("vllm:"):
                assert labels.pop("model_name") == "llm"
                assert set(labels) == ({"finished_reason"} if name == "vllm:request_success_total" else set())
            else:
                assert name.startswith("nv_trt_llm_")
                assert (labels["model"], labels["version"]) == ("llm", "1")


def test_retiring_leaves_zeros_and_a_later_load_in_the_same_server_goes_on() -> None:
    """tritonserver 2.51 keeps the series of a model that was unloaded, at their last values."""
    metrics = TritonMetrics(names())
    metrics.publish(stats())
    metrics.retire()
    gauges = [name for name, (kind, _, _) in MetricFamily.registry.items() if kind == MetricFamily.GAUGE]
    assert [total(name) for name in gauges] == [0.0] * len(gauges)
    assert total("noria_steps_total") == stats().num_steps
    del metrics
    again = TritonMetrics(names())
    again.publish(stats(5))
    assert total("noria_steps_total") == stats().num_steps + stats(5).num_steps
    assert total("noria_kv_blocks") == stats(5).num_kv_blocks


def test_a_gauge_that_a_killed_process_left_behind_is_set_to_zero_at_the_next_load() -> None:
    killed = TritonMetrics(names())
    killed.publish(stats())
    TritonMetrics(names()).publish(EngineStats(levels=tuple(map(LevelStats, LEVELS))))
    assert total("noria_num_requests_running") == total("noria_num_requests_waiting") == 0.0


def test_a_server_without_histograms_or_with_a_name_of_another_kind_still_has_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    MetricFamily("vllm:prompt_tokens_total", "somebody else's", MetricFamily.GAUGE)
    monkeypatch.delattr(MetricFamily, "HISTOGRAM")
    metrics = TritonMetrics(names())
    metrics.publish(stats())
    metrics.observe(TIMINGS)
    assert total("noria_steps_total") == stats().num_steps
    assert "vllm:prompt_tokens_total: Metric family vllm:prompt_tokens_total is of another kind" in caplog.text
    assert "noria_queue_time_seconds" in caplog.text
    assert len(caplog.records) == 2


def test_a_server_without_metrics_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TritonError("there is no metrics endpoint")

    monkeypatch.setattr(MetricFamily, "__init__", refuse)
    metrics = TritonMetrics(names())
    for offset in (0, 1):
        metrics.publish(stats(offset))
        metrics.observe(TIMINGS)
    metrics.retire()
    assert [record.message for record in caplog.records] == [
        "metrics that the server does not take: all: there is no metrics endpoint"
    ]


def test_the_documentation_names_every_series_and_no_other() -> None:
    for mode in ("inflight", "static"):
        TritonMetrics(names(mode))
    documented = set(re.findall(r"^\| `([a-z_:0-9]+)", DOCS.read_text(), re.MULTILINE))
    assert documented == set(MetricFamily.registry)
    for name, (_, _, family) in MetricFamily.registry.items():
        for key in ("request_type", "kv_cache_block_type", "finished_reason"):
            for value in {dict(labels).get(key) for labels in family} - {None}:
                assert f"`{value}`" in DOCS.read_text(), (name, key, value)
