"""How a step's tokens go to prompts and decodes, by exact numbers."""

import pytest

from noria.errors import InvalidRequest
from noria.scheduling.admission import WaitingServedRatio
from noria.scheduling.prefill import EqualProgress, FirstComeChunks, WholePrompts
from noria.scheduling.scheduler import Scheduler
from support.engines import HashRunner, make_request, make_scheduler, step


def lengths(scheduler: Scheduler, runner: HashRunner, num_steps: int) -> list[list[int]]:
    return [[len(row.token_ids) for row in step(scheduler, runner).rows] for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("policy", "claims", "budget", "shares"),
    [
        (FirstComeChunks(), [10, 10, 10], 15, [10, 5, 0]),
        (EqualProgress(), [10, 10, 10], 15, [5, 5, 5]),
        (EqualProgress(), [2, 10, 10], 16, [2, 7, 7]),
        (EqualProgress(), [10, 10, 10], 11, [4, 4, 3]),
        (EqualProgress(), [1, 1], 16, [1, 1]),
        (EqualProgress(), [], 16, []),
        (WholePrompts(), [10, 10, 4], 15, [10, 0, 4]),
    ],
)
def test_shares(
    policy: FirstComeChunks | EqualProgress | WholePrompts, claims: list[int], budget: int, shares: list[int]
) -> None:
    assert policy.shares(claims, budget) == shares


def test_max_prefill_tokens_keeps_a_wave_of_prompts_from_filling_the_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_prefill_tokens=6, prefix_caching=False)
    runner = HashRunner(64, 4)
    scheduler.add(make_request(max_tokens=20))
    step(scheduler, runner)
    for _ in range(3):
        scheduler.add(make_request(range(10), 4))
    assert lengths(scheduler, runner, 5) == [[1, 6], [1, 4, 2], [1, 1, 6], [1, 1, 2, 4], [1, 1, 1, 6]]


def test_equal_progress_advances_all_prompts_together() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9, prefill_order="equal_progress", prefix_caching=False)
    runner = HashRunner(64, 4)
    for _ in range(3):
        scheduler.add(make_request(range(7), 4))
    assert lengths(scheduler, runner, 3) == [[3, 3, 3], [3, 3, 3], [1, 1, 1]]


def test_whole_prompts_wait_for_a_step_that_holds_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=24, chunked_prefill=False, prefix_caching=False)
    runner = HashRunner(64, 4)
    for _ in range(3):
        scheduler.add(make_request(range(12), 4))
    assert lengths(scheduler, runner, 2) == [[12, 12], [1, 1, 12]]


def test_whole_prompts_that_no_step_could_hold_are_refused() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12, chunked_prefill=False)
    with pytest.raises(
        InvalidRequest, match=r"the prompt \(10 tokens\) and max_tokens \(4\) must fit into one step of 12"
    ):
        scheduler.add(make_request(range(10), 4))
    scheduler.add(make_request(range(10), 3))


def test_separate_chunks_take_turns_with_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, prefill_batching="separate", prefix_caching=False)
    runner = HashRunner(64, 4)
    scheduler.add(make_request(max_tokens=20))
    step(scheduler, runner)
    scheduler.add(make_request(range(12), 4))
    assert lengths(scheduler, runner, 5) == [[1], [6], [1], [6], [1, 1]]


def test_tgi_pauses_decodes_for_whole_prompts_and_inserts_a_group_that_is_worth_it() -> None:
    scheduler = make_scheduler(
        chunked_prefill=False,
        prefill_batching="separate",
        insertion="waiting_served_ratio",
        waiting_served_ratio=1.0,
        max_waiting_tokens=5,
        admission="guaranteed_no_evict",
        prefix_caching=False,
    )
    runner = HashRunner(64, 4)
    for _ in range(2):
        scheduler.add(make_request(max_tokens=30))
    step(scheduler, runner)
    # one for two that run is not worth an interruption, until five steps have passed
    scheduler.add(make_request(range(8), 30))
    assert lengths(scheduler, runner, 7) == [[1, 1]] * 5 + [[8], [1, 1, 1]]


def test_waiting_served_ratio() -> None:
    rule = WaitingServedRatio(waiting_served_ratio=0.5, max_waiting_tokens=20)
    assert rule.may_insert(num_running=4, num_waiting=2, num_steps_without=0)
    assert not rule.may_insert(num_running=4, num_waiting=1, num_steps_without=19)
    assert rule.may_insert(num_running=4, num_waiting=1, num_steps_without=20)
    assert rule.may_insert(num_running=0, num_waiting=1, num_steps_without=0)


def test_max_batch_total_tokens_bounds_what_the_batch_may_come_to() -> None:
    scheduler = make_scheduler(admission="guaranteed_no_evict", max_batch_total_tokens=30)
    runner = HashRunner(64, 4)
    for _ in range(3):
        scheduler.add(make_request([1, 2], 10))
    assert [len(row) for row in lengths(scheduler, runner, 2)] == [2, 2]
    with pytest.raises(InvalidRequest, match=r"must fit into max_batch_total_tokens \(30\)"):
        scheduler.add(make_request([1, 2], 29))


@pytest.mark.parametrize("preset", ["orca", "vllm", "tgi", "trtllm", "transformers"])
def test_every_preset_serves_a_mix_to_the_end(preset: str) -> None:
    from noria.presets import PRESETS

    scheduler, runner = make_scheduler(num_blocks=24, **PRESETS[preset]), HashRunner(24, 4)
    for number in range(12):
        scheduler.add(make_request([number] * (1 + 3 * number), 1 + 2 * number))
    while scheduler.has_work:
        output = step(scheduler, runner)
        if preset in ("orca", "tgi", "trtllm"):
            assert not output.preempted_request_ids
    assert scheduler.num_free_blocks == 24


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_stream_of_prompts_does_not_stop_separate_decodes(is_chunked: bool) -> None:
    scheduler = make_scheduler(prefill_batching="separate", chunked_prefill=is_chunked, prefix_caching=False)
    runner = HashRunner(64, 4)
    long = make_request(max_tokens=20)
    scheduler.add(long)
    for _ in range(60):
        scheduler.add(make_request(max_tokens=1))
        step(scheduler, runner)
    assert scheduler.find(long.request_id) is None
