"""From requests to series, through a service: when they are published, by whom, and what happens when that fails."""

import threading
import time
from collections.abc import Iterator

import pytest

from noria.engine import engine_loop
from noria.engine.outputs import EngineStats, LevelStats, RequestOutput, StepReport
from noria.engine.request_timings import RequestTimings
from noria.sequence import FinishReason
from noria.serving import metrics_publisher
from noria.serving.metric_names import MetricNames
from noria.serving.metrics_publisher import MAX_ENDED, MetricsPublisher
from noria.serving.triton_metrics import TritonMetrics
from support.fake_pb_utils import FakeRequest, Metric, MetricFamily, TritonError, series, total
from support.fake_service import FakeService
from support.load_gauges import GAUGES_OF_LOAD
from support.waiting import TIMEOUT_S, wait_until


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricFamily, "registry", {})
    monkeypatch.setattr(metrics_publisher, "PERIOD_S", 0.02)


@pytest.fixture
def service(registry: None) -> Iterator[FakeService]:
    fixture = FakeService("inflight", max_queue_size=40)
    yield fixture
    fixture.service.close()


def num_observed(name: str) -> int:
    return sum(len(metric.observed) for metric in MetricFamily.registry[name][2].values())


@pytest.mark.parametrize("mode", ["inflight", "static", "dynamic"])
def test_everything_is_there_with_its_mode_before_the_first_request(mode: str) -> None:
    fixture = FakeService(mode)
    levels = ["1", "2", "3"] if mode == "inflight" else ["1"]
    for level in levels:
        labels = {"model": "llm", "version": "1", "mode": mode, "class": level}
        assert series("noria_requests_finished_total", **labels).total == 0
        assert series("noria_num_requests_waiting", **labels).total == 0
        assert series("noria_queue_time_seconds", **labels).observed == []
    assert len(MetricFamily.registry["noria_num_requests_waiting"][2]) == len(levels)
    assert series("noria_kv_blocks", mode=mode).total == 64
    assert series("noria_max_num_seqs", mode=mode).total == 4
    assert series("noria_heartbeat_timestamp_seconds", mode=mode).total > 0
    fixture.service.close()


def test_answers_reach_counters_and_histograms_of_their_class(service: FakeService) -> None:
    service.ask(
        service.request("abc", sampling={"max_tokens": 5, "priority": 1}),
        service.request("ab", sampling={"max_tokens": 20, "stop": ["e"]}),
        service.request("a", sampling={"max_tokens": 0}),
        service.request("a", sampling={"max_tokens": 2, "priority": 9}),
    )
    wait_until(lambda: total("noria_requests_finished_total") == 2)
    wait_until(lambda: num_observed("vllm:request_generation_tokens") == 2)
    assert series("noria_requests_finished_total", **{"class": "1"}).total == 1
    assert series("noria_requests_finished_total", **{"class": "2"}).total == 1
    assert series("noria_request_prompt_tokens", **{"class": "1"}).observed == [3]
    assert series("noria_request_generation_tokens", **{"class": "1"}).observed == [5]
    # the stop string ends with the third letter
    assert series("noria_request_generation_tokens", **{"class": "2"}).observed == [3]
    assert series("vllm:request_success_total", finished_reason="stop").total == 1
    assert series("vllm:request_success_total", finished_reason="length").total == 1
    assert total("noria_generation_tokens_total") == total("vllm:generation_tokens_total") == 8
    # one was refused as it was read, the other by the scheduler
    wait_until(lambda: total("noria_requests_invalid_total") == 2)
    assert total("noria_requests_failed_total") == 0


def hold_and_fill(service: FakeService, num_requests: int) -> list[FakeRequest]:
    service.runner.gate.clear()
    requests = [service.request("abcd", sampling={"max_tokens": 100}, stream=True) for _ in range(num_requests)]
    service.service.execute(requests[:4])
    wait_until(lambda: service.engine.stats().num_running == 4)
    service.service.execute(requests[4:])
    return requests


def test_gauges_return_to_zero_after_a_mass_abort_with_no_further_request(service: FakeService) -> None:
    requests = hold_and_fill(service, 30)
    for request in requests:
        request.sender.cancelled = True
    for request in requests:
        wait_until(lambda request=request: request.sender.num_finals == 1)  # type: ignore[misc]
    service.runner.gate.set()
    wait_until(lambda: total("noria_requests_cancelled_total") == 30)
    for name in GAUGES_OF_LOAD:
        wait_until(lambda name=name: total(name) == 0)  # type: ignore[misc]
    assert total("nv_trt_llm_request_metrics", request_type="active") == 0
    assert total("nv_trt_llm_inflight_batcher_metrics") == 0
    assert series("vllm:request_success_total", finished_reason="abort").total == 30
    # of the four that came to a step, and nothing else of any
    wait_until(lambda: num_observed("noria_queue_time_seconds") == 4)
    assert num_observed("noria_e2e_request_latency_seconds") == num_observed("noria_request_prompt_tokens") == 0


def test_what_waits_and_what_is_refused_shows_in_its_class() -> None:
    fixture = FakeService("inflight", max_num_seqs=1, max_queue_size=1)
    fixture.runner.gate.clear()
    running = fixture.request("abcd", sampling={"max_tokens": 2})
    fixture.service.execute([running])
    wait_until(lambda: fixture.engine.stats().num_running == 1)
    waiting = fixture.request("abcdef", sampling={"max_tokens": 2, "priority": 1})
    refused = fixture.request("a", sampling={"max_tokens": 2, "priority": 3})
    fixture.service.execute([waiting, refused])
    # one step at a time: what came during the first is taken after it
    fixture.runner.gate.set()
    for request in (running, waiting, refused):
        wait_until(lambda request=request: request.sender.num_finals == 1)  # type: ignore[misc]
    wait_until(lambda: total("noria_requests_finished_total") == 2)
    assert series("noria_requests_rejected_total", **{"class": "3"}).total == 1
    assert total("noria_requests_failed_total") == total("noria_requests_rejected_total") == 1
    fixture.service.close()


def test_no_call_to_triton_is_made_by_the_engine_or_the_writer(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: set[str] = set()
    check = Metric._check

    def noted_check(self: Metric, *kinds: int) -> None:
        callers.add(threading.current_thread().name)
        check(self, *kinds)

    monkeypatch.setattr(Metric, "_check", noted_check)
    service.ask(*[service.request("a", sampling={"max_tokens": 20}, stream=True) for _ in range(4)])
    wait_until(lambda: num_observed("noria_queue_time_seconds") == 4)
    assert callers == {"noria-metrics"}


def test_a_server_that_fails_is_complained_of_once_and_published_to_when_it_recovers(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_failures = 0

    def fail(self: Metric, *_: int) -> None:
        nonlocal num_failures
        num_failures += 1
        raise TritonError("the server is busy")

    with monkeypatch.context() as patch:
        patch.setattr(Metric, "_check", fail)
        (responses,) = service.ask(service.request("a", sampling={"max_tokens": 3}))
        assert not responses[0].has_error()
        wait_until(lambda: num_failures > 3)
    wait_until(lambda: total("noria_requests_finished_total") == 1)
    wait_until(lambda: num_observed("noria_e2e_request_latency_seconds") == 1)
    assert [record.message for record in caplog.records] == ["metrics could not be published"]


def test_closing_publishes_the_last_counts_and_zeros_for_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_publisher, "PERIOD_S", TIMEOUT_S)
    fixture = FakeService("inflight")
    fixture.ask(fixture.request("a", sampling={"max_tokens": 3}))
    assert total("noria_requests_finished_total") == 0
    fixture.service.close()
    assert total("noria_requests_finished_total") == 1
    assert num_observed("noria_queue_time_seconds") == 1
    assert total("noria_kv_blocks") == total("noria_heartbeat_timestamp_seconds") == 0
    assert "noria-metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_model_loaded_again_in_the_same_server_publishes_again() -> None:
    """A collected family makes its metric raise; the old one's are gone by then, as its process is."""
    for num_loads in (1, 2):
        fixture = FakeService("inflight")
        fixture.ask(fixture.request("a", sampling={"max_tokens": 3}))
        wait_until(lambda num_loads=num_loads: total("noria_requests_finished_total") == num_loads)  # type: ignore[misc]
        assert total("noria_kv_blocks") == 64
        fixture.service.close()


def test_the_heartbeat_goes_on_when_idle_and_stops_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "HEARTBEAT_S", 0.02)
    fixture = FakeService("inflight")
    first = total("noria_heartbeat_timestamp_seconds")
    wait_until(lambda: total("noria_heartbeat_timestamp_seconds") > first)
    fixture.runner.gate.clear()
    fixture.service.execute([fixture.request("a", sampling={"max_tokens": 3})])
    wait_until(lambda: fixture.engine.stats().num_running == 1)
    stuck = fixture.service._publisher._stats.heartbeat_s
    wait_until(lambda: total("noria_heartbeat_timestamp_seconds") == stuck)
    time.sleep(0.3)
    assert total("noria_heartbeat_timestamp_seconds") == stuck
    fixture.runner.gate.set()
    wait_until(lambda: total("noria_heartbeat_timestamp_seconds") > stuck)
    fixture.service.close()


def test_ended_requests_that_nobody_observes_in_time_are_bounded() -> None:
    stats = EngineStats(levels=(LevelStats(1),))
    publisher = MetricsPublisher(TritonMetrics(MetricNames("llm", "1", "inflight", (1,))), stats)
    timings = RequestTimings(1, FinishReason.STOP, 1, 1, 0, 0.0, 0.0, None, None, 0.0)
    outputs = tuple(RequestOutput(index, finish_reason=FinishReason.STOP, timings=timings) for index in range(5000))
    publisher.deliver(StepReport(outputs, stats))
    publisher.start()
    assert publisher.stop(TIMEOUT_S)
    assert num_observed("noria_queue_time_seconds") == MAX_ENDED
