"""What the modes do, step by step, by exact numbers."""

import pytest

from noria.engine.metrics import StatsCounter
from noria.errors import InvalidRequest, Overloaded
from noria.scheduling.scheduler import Scheduler
from noria.sequence import FinishReason, Request
from support.engines import HashRunner, expected_output, make_request, make_scheduler, step

OUTPUT_LENGTHS = (20, 50, 100, 500)


def run_until_idle(scheduler: Scheduler, runner: HashRunner) -> StatsCounter:
    counter = StatsCounter(64, 4)
    while scheduler.has_work:
        counter.count_step(step(scheduler, runner))
    return counter


def outputs_of(runner: HashRunner, request: Request) -> list[int]:
    """The tokens sampled for a request, read from the rows in which they were the last known token."""
    tokens = []
    for output in runner.outputs:
        for row in output.rows:
            if row.request_id == request.request_id and not row.is_padding and row.sampling:
                tokens.append(row.token_ids[-1])
    return tokens[1:]


def test_static_four_requests_take_500_steps_and_a_third_of_the_slots_is_useful() -> None:
    scheduler, runner = make_scheduler(num_blocks=256, batching_mode="static"), HashRunner(256, 4)
    for max_tokens in OUTPUT_LENGTHS:
        scheduler.add(make_request(max_tokens=max_tokens))
    stats = run_until_idle(scheduler, runner).snapshot(scheduler)
    assert stats.num_steps == 500
    assert stats.num_slot_steps == stats.num_rows == 2000
    assert stats.num_useful_slot_steps == 670
    assert stats.num_useful_slot_steps / stats.num_slot_steps == 0.335


def test_static_a_request_that_arrives_at_step_1_waits_499_steps() -> None:
    scheduler, runner = make_scheduler(num_blocks=256, batching_mode="static"), HashRunner(256, 4)
    for max_tokens in OUTPUT_LENGTHS:
        scheduler.add(make_request(max_tokens=max_tokens))
    step(scheduler, runner)
    late = make_request(max_tokens=1, batch_id=1)
    scheduler.add(late)
    num_waited = 0
    while all(row.request_id != late.request_id for row in step(scheduler, runner).rows):
        num_waited += 1
    assert num_waited == 499


def test_in_flight_a_waiting_request_computes_at_step_21_in_place_of_the_one_that_left_at_20() -> None:
    scheduler, runner = make_scheduler(num_blocks=256), HashRunner(256, 4)
    requests = [make_request(max_tokens=max_tokens) for max_tokens in OUTPUT_LENGTHS]
    late = make_request(max_tokens=30)
    for request in [*requests, late]:
        scheduler.add(request)
    steps = [{row.request_id for row in step(scheduler, runner).rows} for _ in range(21)]
    short, *rest = [request.request_id for request in requests]
    assert steps[:20] == [{short, *rest}] * 20
    assert steps[20] == {late.request_id, *rest}


def test_in_flight_leaves_no_slot_unused_while_anyone_waits() -> None:
    scheduler, runner = make_scheduler(num_blocks=512), HashRunner(512, 4)
    for max_tokens in OUTPUT_LENGTHS * 4:
        scheduler.add(make_request(max_tokens=max_tokens))
    while scheduler.num_waiting:
        assert len(step(scheduler, runner).rows) == 4


def test_static_keeps_the_blocks_of_a_finished_row_and_returns_them_all_at_the_end() -> None:
    scheduler, runner = make_scheduler(num_blocks=16, batching_mode="static"), HashRunner(16, 4)
    scheduler.add(make_request(max_tokens=2))
    scheduler.add(make_request(max_tokens=9))
    for _ in range(4):
        output = step(scheduler, runner)
    padding = [row for row in output.rows if row.is_padding]
    assert [len(row.token_ids) for row in padding] == [1]
    assert padding[0].num_computed_tokens == 4
    assert output.num_allocated_blocks == 3
    assert output.num_live_kv_tokens == 6
    run_until_idle(scheduler, runner)
    assert scheduler.num_free_blocks == 16


def test_static_splits_a_batch_that_is_larger_than_its_slots_or_its_pool() -> None:
    scheduler, runner = make_scheduler(num_blocks=4, batching_mode="static"), HashRunner(4, 4)
    for _ in range(5):
        scheduler.add(make_request(max_tokens=5))
    sizes = []
    while scheduler.has_work:
        sizes.append(len(step(scheduler, runner).rows))
    assert sizes == [2] * 5 + [2] * 5 + [1] * 5


def test_static_never_mixes_the_requests_of_two_calls() -> None:
    scheduler, runner = make_scheduler(batching_mode="static"), HashRunner(64, 4)
    for batch_id in (1, 1, 2):
        scheduler.add(make_request(max_tokens=2, batch_id=batch_id))
    assert [len(step(scheduler, runner).rows) for _ in range(4)] == [2, 2, 1, 1]


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8), HashRunner(64, 4)
    first, long = make_request(max_tokens=10), make_request(prompt=range(20), max_tokens=3)
    scheduler.add(first)
    step(scheduler, runner)
    scheduler.add(long)
    lengths = [[len(row.token_ids) for row in step(scheduler, runner).rows] for _ in range(4)]
    assert lengths == [[1, 7], [1, 7], [1, 6], [1, 1]]
    run_until_idle(scheduler, runner)
    assert outputs_of(runner, long) == expected_output(range(20), 2)


def test_out_of_blocks_the_latest_arrival_is_preempted_and_its_output_is_unchanged() -> None:
    scheduler, runner = make_scheduler(num_blocks=6), HashRunner(6, 4)
    requests = [make_request(prompt=[value] * 5, max_tokens=12) for value in range(3)]
    for request in requests:
        scheduler.add(request)
    preempted: list[int] = []
    while scheduler.has_work:
        preempted += step(scheduler, runner).preempted_request_ids
    assert preempted
    assert requests[0].request_id not in preempted
    # recomputation shows as rows of several tokens, so compare what was computed last at every position
    for request in requests:
        tokens: dict[int, int] = {}
        for output in runner.outputs:
            for row in output.rows:
                if row.request_id == request.request_id:
                    tokens |= dict(enumerate(row.token_ids, start=row.num_computed_tokens))
        assert [tokens[index] for index in range(5, 16)] == expected_output(request.prompt_token_ids, 11)
    assert scheduler.num_free_blocks == 6


def test_a_request_that_could_never_fit_is_refused_and_nothing_behind_it_waits() -> None:
    scheduler, runner = make_scheduler(num_blocks=2), HashRunner(2, 4)
    with pytest.raises(InvalidRequest, match="must fit into the KV cache of 8 tokens"):
        scheduler.add(make_request(prompt=range(5), max_tokens=4))
    scheduler.add(make_request(prompt=range(5), max_tokens=3))
    assert len(step(scheduler, runner).rows) == 1


def test_a_full_queue_refuses_by_requests_beyond_the_free_slots() -> None:
    scheduler = make_scheduler(max_queue_size=2, max_num_seqs=3)
    for _ in range(5):
        scheduler.add(make_request())
    with pytest.raises(Overloaded, match="max_queue_size is 2"):
        scheduler.add(make_request())
    assert scheduler.num_waiting == 5


def test_a_full_queue_refuses_by_tokens_but_takes_a_long_prompt_when_nobody_waits() -> None:
    scheduler = make_scheduler(max_queue_tokens=5, max_num_seqs=1)
    scheduler.add(make_request())
    scheduler.schedule()
    scheduler.add(make_request(prompt=range(9)))
    with pytest.raises(Overloaded, match="it holds 9 prompt tokens, this request has 3, max_queue_tokens is 5"):
        scheduler.add(make_request(prompt=range(3)))
    assert scheduler.num_waiting == 1


def test_a_burst_that_finds_free_slots_is_not_waiting() -> None:
    scheduler = make_scheduler(max_queue_tokens=5, max_num_seqs=4)
    for _ in range(4):
        scheduler.add(make_request(prompt=range(9)))
    assert scheduler.num_waiting == 4


def test_free_slots_that_nobody_can_take_for_want_of_blocks_do_not_lengthen_the_queue() -> None:
    scheduler, runner = make_scheduler(4, admission="guaranteed_no_evict", max_queue_size=2), HashRunner(4, 4)
    scheduler.add(make_request(range(4), 12))
    step(scheduler, runner)
    for number in range(2):
        scheduler.add(make_request([number] * 12, 4))
        step(scheduler, runner)
    with pytest.raises(Overloaded, match="max_queue_size is 2"):
        scheduler.add(make_request([9] * 12, 4))


def test_in_a_closed_mode_the_queue_has_no_limit_of_its_own() -> None:
    scheduler = make_scheduler(batching_mode="static", max_queue_size=1, max_queue_tokens=1)
    for _ in range(9):
        scheduler.add(make_request())
    assert scheduler.num_waiting == 9


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    scheduler = make_scheduler()
    for _ in range(200):
        request = make_request(deadline=1e12)
        scheduler.add(request)
        scheduler.finish(request.request_id, FinishReason.CANCELLED)
    assert len(scheduler._deadlines._heap) < 20


@pytest.mark.parametrize("mode", ["inflight", "static"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4], ids=["queued", "mid-prefill", "prefilled", "decoding"])
def test_a_cancelled_request_returns_its_blocks_at_once(mode: str, num_steps: int) -> None:
    scheduler, runner = make_scheduler(batching_mode=mode, max_num_batched_tokens=8), HashRunner(64, 4)
    other, cancelled = make_request(max_tokens=20), make_request(prompt=range(12), max_tokens=20)
    scheduler.add(other)
    scheduler.add(cancelled)
    for _ in range(num_steps):
        step(scheduler, runner)
    assert scheduler.finish(cancelled.request_id, FinishReason.CANCELLED)
    other_sequence = scheduler.find(other.request_id)
    assert other_sequence is not None
    assert scheduler.num_free_blocks == 64 - len(other_sequence.block_table)
    assert not scheduler.finish(cancelled.request_id, FinishReason.CANCELLED)
    run_until_idle(scheduler, runner)
    assert outputs_of(runner, other) == expected_output(other.prompt_token_ids, 19)
    assert scheduler.num_free_blocks == 64


def test_a_deadline_ends_a_request_whether_it_waits_or_runs() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1), HashRunner(64, 4)
    running, waiting, patient = (make_request(max_tokens=9, deadline=deadline) for deadline in (5.0, 3.0, None))
    for request in (running, waiting, patient):
        scheduler.add(request)
    step(scheduler, runner)
    assert scheduler.expire(2.9) == []
    assert scheduler.expire(3.0) == [waiting.request_id]
    assert scheduler.expire(9.0) == [running.request_id]
    assert {row.request_id for row in step(scheduler, runner).rows} == {patient.request_id}


def test_a_failed_row_ends_alone() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    good, bad = make_request(max_tokens=6), make_request(prompt=[9, 9], max_tokens=6)
    scheduler.add(good)
    scheduler.add(bad)
    step(scheduler, runner)
    runner.failing.add(bad.request_id)
    output = scheduler.schedule()
    updates = {update.request_id: update for update in scheduler.update(output, runner.execute(output))}
    assert updates[bad.request_id].finish_reason is FinishReason.ERROR
    assert updates[good.request_id].finish_reason is None
    run_until_idle(scheduler, runner)
    assert outputs_of(runner, good) == expected_output(good.prompt_token_ids, 5)


def test_stop_tokens_end_a_request_but_not_before_min_tokens() -> None:
    prompt = (1, 2, 3)
    third = expected_output(prompt, 3)[2]
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    plain = make_request(prompt, max_tokens=10, stop_token_ids=[third])
    long = make_request(prompt, max_tokens=10, stop_token_ids=[third], min_tokens=5)
    scheduler.add(plain)
    scheduler.add(long)
    outputs = [step(scheduler, runner) for _ in range(3)]
    assert scheduler.find(plain.request_id) is None
    banned = [row.sampling.banned_token_ids for row in outputs[2].rows if row.sampling]
    assert banned == [(), [third]]
