"""The real Prometheus scraping the real server: every query of the dashboard, the rules and the autoscalers is asked.

And a replica's drain, with a stream under way. On a tiny model.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import yaml

from noria.serving.server import RunningServer
from support.prometheus import (
    KUBERNETES,
    PrometheusServer,
    Query,
    autoscaler_queries,
    dashboard_queries,
    rules,
    series_names,
    tool,
    without_samples,
)
from support.raw_triton import RawStream, text_inputs
from support.tiny_models import tiny_model_dir

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0, "ignore_eos": True}
# of 4 answers of 700 tokens one is driven out of a pool for 2,000, and of more than 4 requests that wait one is refused
SMALL = {"max_num_seqs": 4, "num_kv_blocks": 125, "max_queue_size": 4}
ANSWER_TOKENS = 700
TEXT = "A water wheel turns in the river, and its buckets are emptied and filled again while it turns. "
# gauges, which are seen only when they are scraped: a load may be over within the second between two scrapes
FULL = (
    "max_over_time(noria_num_requests_running[5m]) == noria_max_num_seqs",
    "max_over_time(instance:noria_requests_waiting:sum[5m]) > 0",
    "max_over_time(noria_kv_usage[5m]) > 0.8",
)
MAX_LOADS = 60
Serve = Callable[[str], RunningServer]


def stream(server: RunningServer, max_tokens: int, **options: object) -> RawStream:
    return RawStream(server.grpc_url, text_inputs(TEXT, GREEDY | options | {"max_tokens": max_tokens}, stream=True))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., RunningServer]) -> Serve:
    model = tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model", "llama", max_position_embeddings=2048)
    return lambda mode: start_server(mode, model=str(model), **SMALL)


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[Callable[[str], PrometheusServer]]:
    """From a mode to a Prometheus that has seen its server before, under and after load."""
    with ExitStack() as stack:
        observers: dict[str, PrometheusServer] = {}

        def observer(mode: str) -> PrometheusServer:
            if mode not in observers:
                server = serve(mode)
                prometheus = PrometheusServer(tmp_path_factory.mktemp("prometheus"), server.metrics_address)
                observers[mode] = stack.enter_context(prometheus)
                # rates need the counters as they were before
                prometheus.wait_for("noria_steps_total")
                send_load(server)
                for _ in range(MAX_LOADS if mode == "inflight" else 0):
                    if all(prometheus.query(expr) for expr in FULL):
                        break
                    send_load(server)
                # the end of the longest chain of records, of which each is evaluated once a second
                prometheus.wait_for("model:noria_slo_ttft_missed:ratio6h >= 0")
            return observers[mode]

        yield observer


def send_load(server: RunningServer) -> None:
    """Ten requests of two classes, of which one is cancelled; in flight, those beyond slots and queue are refused."""
    streams = [stream(server, ANSWER_TOKENS, priority=1 + number % 2) for number in range(9)]
    stream(server, ANSWER_TOKENS).cancel()
    for each in streams:
        each.all()


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_every_query_finds_data(observe: Callable[[str], PrometheusServer], mode: str) -> None:
    prometheus = observe(mode)
    assert without_samples(prometheus, dashboard_queries()) == set()
    assert without_samples(prometheus, autoscaler_queries()) == set()
    records = [Query(rule["record"], rule["expr"]) for rule in rules() if "record" in rule]
    assert without_samples(prometheus, records) == set()


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_every_alert_reads_series_that_exist(observe: Callable[[str], PrometheusServer], mode: str) -> None:
    """An alert that finds nothing is in order only if what it reads is there."""
    prometheus = observe(mode)
    for rule in rules():
        for name in series_names(rule["expr"]):
            assert prometheus.query(name), f"{name} of {rule.get('alert') or rule['record']}"
    evaluated = [rule for group in prometheus.rule_groups() for rule in group["rules"]]
    assert [rule["name"] for rule in evaluated if rule["health"] != "ok"] == []
    assert len(evaluated) == len(rules())
    assert prometheus.query('ALERTS{alertname=~"NoriaDown|NoriaHeartbeatStale|NoriaNoProgress"}') == []


def test_a_full_server_shows(observe: Callable[[str], PrometheusServer]) -> None:
    prometheus = observe("inflight")
    for expr in (
        *FULL,
        "increase(noria_preemptions_total[5m]) > 0",
        "sum(increase(noria_requests_rejected_total[5m])) > 0",
        'ALERTS{alertname="NoriaRejecting", alertstate="pending"}',
    ):
        assert prometheus.query(expr), expr


def test_a_drain_outlasts_the_stream_that_is_under_way(serve: Serve) -> None:
    server = serve("inflight")
    script = yaml.safe_load((KUBERNETES / "config.yaml").read_text())["data"]["drain.sh"]
    limit_s = 120
    environment = os.environ | {
        "METRICS_URL": f"http://{server.metrics_address}/metrics",
        "SETTLE_S": "0",
        "LIMIT_S": str(limit_s),
    }
    tool("curl", "curl")
    under_way = stream(server, 1800)
    under_way.next()
    start = time.monotonic()
    with subprocess.Popen(["sh", "-c", script], env=environment) as drain:
        responses = under_way.all()
        assert drain.poll() is None, "it ended before the stream did"
        assert drain.wait(timeout=30) == 0
    assert responses[-1].error is None
    assert time.monotonic() - start < limit_s
