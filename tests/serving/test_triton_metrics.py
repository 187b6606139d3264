"""Every figure of the engine reaches Triton's metrics under a name of its own."""

from collections.abc import Mapping
from dataclasses import fields

import pytest

from noria.engine.outputs import EngineStats
from noria.serving.triton_metrics import TritonMetrics
from support import fake_pb_utils
from support.fake_pb_utils import Metric, MetricFamily


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, Metric]]:
    """Kind and metric by name, of all that are made."""
    metrics: dict[str, tuple[int, Metric]] = {}

    class RecordedFamily(MetricFamily):
        def Metric(self, labels: Mapping[str, str]) -> Metric:
            assert labels == {"model": "llm", "version": "1"}
            metric = super().Metric(labels)
            assert self.name not in metrics
            metrics[self.name] = (self.kind, metric)
            return metric

    monkeypatch.setattr(fake_pb_utils, "MetricFamily", RecordedFamily)
    return metrics


def stats(offset: int) -> EngineStats:
    return EngineStats(**{field.name: offset + index for index, field in enumerate(fields(EngineStats))})


def test_counters_grow_to_the_engines_and_gauges_are_set(published: dict[str, tuple[int, Metric]]) -> None:
    metrics = TritonMetrics("llm", "1")
    for offset in (1, 101):
        metrics.publish(stats(offset))
        own = {name: metric.total for name, (_, metric) in published.items() if name != "noria_slot_utilisation"}
        # each figure of the engine has another value here, so none can be missing or stand in for another
        assert sorted(own.values()) == [offset + index for index in range(len(fields(EngineStats)))]


def test_names_say_what_kind_they_are(published: dict[str, tuple[int, Metric]]) -> None:
    TritonMetrics("llm", "1")
    kinds = {name: kind for name, (kind, _) in published.items()}
    assert {name for name, kind in kinds.items() if kind == MetricFamily.COUNTER} == {
        name for name in kinds if name.endswith("_total")
    }
    assert set(kinds) >= {
        "noria_requests_rejected_total",
        "noria_requests_expired_total",
        "noria_requests_cancelled_total",
        "noria_recomputed_tokens_total",
        "noria_prefix_hit_tokens_total",
        "noria_swap_outs_total",
        "noria_num_requests_paused",
        "noria_kv_blocks_cached",
    }
