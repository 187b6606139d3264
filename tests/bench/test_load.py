"""Load on a real tritonserver: every request becomes one record, whatever becomes of the request."""

from __future__ import annotations

import asyncio

import pytest

from noria_bench.load import ABORTED, LoadRun, run_load
from noria_bench.records import Outcome
from noria_bench.workload import WorkItem, Workload
from noria_client.client import AsyncClient


def workload_of(*prompts, max_tokens=10):
    return Workload(tuple(WorkItem(prompt, len(prompt.split()), max_tokens) for prompt in prompts))


def load(echo_server, model, workload, concurrency=None, stop_after_s=None):
    """The finished run; with stop_after_s, what there was when it was cancelled."""
    run = LoadRun(len(workload.items))

    async def main():
        async with AsyncClient(echo_server.grpc, model=model) as client:
            await asyncio.wait_for(run_load(client, workload, run, concurrency), stop_after_s)

    if stop_after_s is None:
        asyncio.run(main())
    else:
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(main())
    run.records.sort(key=lambda record: record.index)
    return run


def test_chunks_of_streams(echo_server):
    run = load(echo_server, "stream", workload_of("a b c", "d"))
    assert [record.num_output_tokens for record in run.records] == [3, 1]
    first = run.records[0]
    # three words and the end
    assert [chunk.num_tokens for chunk in first.chunks] == [1, 1, 1, 0]
    assert first.num_input_tokens == 3
    assert first.error is None
    assert first.sent_s <= first.chunks[0].time_s <= first.chunks[-1].time_s <= first.ended_s
    assert run.num_tokens == 4


def test_a_whole_answer_is_one_chunk(echo_server):
    run = load(echo_server, "whole_batched", workload_of("a b c", "d"))
    assert [[chunk.num_tokens for chunk in record.chunks] for record in run.records] == [[3], [1]]


def test_errors_are_recorded_beside_the_rest(echo_server):
    run = load(echo_server, "stream", workload_of("a", "!late b", "!error no such thing"))
    assert [record.error for record in run.records] == [None, "UNKNOWN: late failure", "UNKNOWN: no such thing"]
    assert run.records[1].num_output_tokens == 1
    assert run.num_errors == 2


def test_all_at_once(echo_server):
    run = load(echo_server, "stream", workload_of(*["!slow a b"] * 8))
    assert max(record.sent_s for record in run.records) < min(record.ended_s for record in run.records)


def test_closed_loop(echo_server):
    run = load(echo_server, "stream", workload_of(*["!slow a"] * 6), concurrency=2)
    assert [record.index for record in run.records] == list(range(6))
    for record in run.records:
        under_way = [other for other in run.records if other.sent_s <= record.sent_s < other.ended_s]
        assert len(under_way) <= 2


def test_a_cancelled_load_keeps_its_records(echo_server):
    workload = workload_of("a", "!endless", "never sent", max_tokens=1000)
    run = load(echo_server, "stream", workload, concurrency=1, stop_after_s=0.3)
    assert [record.error for record in run.records] == [None, ABORTED]
    assert run.records[1].num_output_tokens >= 1


def test_bad_concurrency(echo_server):
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        load(echo_server, "stream", workload_of("a"), concurrency=0)


def test_an_open_loop_sends_when_due_whatever_is_under_way(echo_server):
    items = [WorkItem("!endless", 1, 1000, due_s=0.0, cancel_after_tokens=5), WorkItem("a", 1, 5, due_s=0.1)]
    run = load(echo_server, "stream", Workload(tuple(items)))
    first, second = run.records
    assert second.due_s - first.due_s == pytest.approx(0.1)
    assert first.lateness_s >= 0
    assert second.lateness_s >= 0
    assert first.ended_s > second.sent_s


def test_a_request_is_left_after_so_many_tokens_and_the_server_is_told(echo_server):
    items = [WorkItem("!endless and cancelled", 1, 1000, cancel_after_tokens=3, request_class="leaves")]
    (record,) = load(echo_server, "stream", Workload(tuple(items))).records
    assert (record.outcome, record.error, record.request_class) == (Outcome.CANCELLED, None, "leaves")
    assert record.num_output_tokens == 3
    asked = Workload((WorkItem("!cancelled", 1, 100),))
    # the server notices within some milliseconds
    for _ in range(100):
        (answer,) = load(echo_server, "stream", asked).records
        if answer.num_output_tokens:
            break
    assert answer.num_output_tokens


def test_what_each_failure_is_counted_as(echo_server):
    texts = {
        "!error the waiting queue is full: max_queue_size is 1 requests": Outcome.REJECTED,
        "!error [StatusCode.UNAVAILABLE] Exceeds maximum queue size": Outcome.REJECTED,
        "!error the request's timeout passed before it was done": Outcome.EXPIRED,
        "!error Request timeout expired": Outcome.EXPIRED,
        "!error text_input must hold at least one prompt": Outcome.FAILED,
    }
    run = load(echo_server, "stream", workload_of(*texts))
    assert [record.outcome for record in run.records] == list(texts.values())


def test_a_concurrency_would_hold_back_what_is_due(echo_server):
    with pytest.raises(ValueError, match="concurrency is for a closed loop"):
        load(echo_server, "stream", Workload((WorkItem("a", 1, 1, due_s=0.0),)), concurrency=1)
