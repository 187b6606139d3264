"""Prefix caching by exact block ids. Blocks hold 4 tokens."""

from noria.scheduling.block_hash import block_hash, root_hash
from noria.scheduling.scheduler import Scheduler
from noria.sequence import FinishReason, Request
from support.engines import HashRunner, make_request, make_scheduler, step

PROMPT = tuple(range(10))


def table_of(scheduler: Scheduler, request: Request) -> list[int]:
    sequence = scheduler.find(request.request_id)
    assert sequence is not None
    return sequence.block_table


def run_alone(scheduler: Scheduler, runner: HashRunner, request: Request) -> None:
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler, runner)


def test_full_blocks_of_an_equal_beginning_are_shared_while_their_owner_runs() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    first, second = make_request(PROMPT, 8), make_request((*PROMPT[:8], 99), 8)
    scheduler.add(first)
    step(scheduler, runner)
    scheduler.add(second)
    output = step(scheduler, runner)
    assert table_of(scheduler, first) == [0, 1, 2]
    assert table_of(scheduler, second) == [0, 1, 3]
    assert [len(row.token_ids) for row in output.rows] == [1, 1]
    assert (output.num_prefix_tokens, output.num_prefix_hit_tokens) == (9, 8)
    assert scheduler._cache.pool.ref_count(0) == 2


def test_a_finished_request_leaves_its_full_blocks_to_be_found_output_included() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    first = make_request(PROMPT, 4)
    scheduler.add(first)
    sequence = scheduler.find(first.request_id)
    assert sequence is not None
    while scheduler.has_work:
        step(scheduler, runner)
    # 10 prompt tokens and 3 computed outputs fill three blocks; the fourth, with one token, is blank again
    assert (scheduler.num_cached_blocks, scheduler.num_free_blocks) == (3, 64)
    follow_up = make_request(tuple(sequence.token_ids), 2)
    scheduler.add(follow_up)
    output = step(scheduler, runner)
    assert output.num_prefix_hit_tokens == 12
    assert table_of(scheduler, follow_up)[:3] == [0, 1, 2]


def test_one_token_at_least_is_left_to_be_computed() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    run_alone(scheduler, runner, make_request(PROMPT[:8], 1))
    assert scheduler.num_cached_blocks == 2
    scheduler.add(make_request(PROMPT[:8], 1))
    output = step(scheduler, runner)
    assert [row.num_computed_tokens for row in output.rows] == [4]


def test_blocks_are_evicted_least_recently_used_first_and_a_context_from_its_end() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), HashRunner(5, 4)
    run_alone(scheduler, runner, make_request(PROMPT[:9], 1))
    assert scheduler.num_cached_blocks == 2
    # takes the three blank blocks and one cached one, which is the second half of the first prompt
    run_alone(scheduler, runner, make_request([50] * 13, 1))
    scheduler.add(make_request(PROMPT[:9], 1))
    assert step(scheduler, runner).num_prefix_hit_tokens == 4


def test_blocks_in_use_are_never_evicted() -> None:
    scheduler, runner = make_scheduler(num_blocks=6), HashRunner(6, 4)
    long = make_request(PROMPT, 14)
    scheduler.add(long)
    for number in range(12):
        scheduler.add(make_request([100 + number] * 5, 1))
        step(scheduler, runner)
    while scheduler.has_work:
        step(scheduler, runner)
    assert scheduler.num_free_blocks == 6


def test_a_salt_separates_and_an_equal_salt_shares() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    run_alone(scheduler, runner, make_request(PROMPT, 2, cache_salt="ann"))
    hits = []
    for salt in ("", "bob", "ann"):
        scheduler.add(make_request(PROMPT, 2, cache_salt=salt))
        hits.append(step(scheduler, runner).num_prefix_hit_tokens)
    assert hits == [0, 0, 8]


def test_the_hash_covers_parent_tokens_and_salt() -> None:
    keys = {
        block_hash(root_hash(""), [1, 2]),
        block_hash(root_hash("a"), [1, 2]),
        block_hash(root_hash(""), [2, 1]),
        block_hash(block_hash(root_hash(""), [1, 2]), [1, 2]),
        # as text these would be the same
        block_hash(root_hash(""), [12]),
        block_hash(root_hash(""), [1, 2, 0]),
    }
    assert len(keys) == 6
    assert all(len(key) == 32 for key in keys)


def test_a_failed_requests_blocks_are_not_found() -> None:
    scheduler, runner = make_scheduler(), HashRunner(64, 4)
    bad = make_request(PROMPT, 8)
    scheduler.add(bad)
    step(scheduler, runner)
    runner.failing.add(bad.request_id)
    step(scheduler, runner)
    assert scheduler.num_cached_blocks == 0
    scheduler.add(make_request(PROMPT, 8))
    assert step(scheduler, runner).num_prefix_hit_tokens == 0


def test_blocks_of_a_prompt_that_was_cancelled_midway_are_not_found() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8), HashRunner(64, 4)
    cancelled = make_request(range(30), 8)
    scheduler.add(cancelled)
    step(scheduler, runner)
    scheduler.finish(cancelled.request_id, FinishReason.CANCELLED)
    assert scheduler.num_cached_blocks == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    scheduler, runner = make_scheduler(prefix_caching=False), HashRunner(64, 4)
    run_alone(scheduler, runner, make_request(PROMPT, 4))
    scheduler.add(make_request(PROMPT, 4))
    assert step(scheduler, runner).num_prefix_hit_tokens == 0
    assert scheduler.num_cached_blocks == 0


def test_the_members_of_a_closed_batch_share_what_an_earlier_batch_computed() -> None:
    scheduler, runner = make_scheduler(batching_mode="static"), HashRunner(64, 4)
    run_alone(scheduler, runner, make_request(PROMPT, 2))
    for _ in range(3):
        scheduler.add(make_request(PROMPT, 2, batch_id=1))
    assert step(scheduler, runner).num_prefix_hit_tokens == 24
