"""Who is driven out, what becomes of what it had computed, and how often. Blocks hold 4 tokens."""

from typing import Any

import pytest

from noria.scheduler_output import BlockCopy, SchedulerOutput
from noria.scheduling.scheduler import Scheduler
from noria.sequence import FinishReason, Request, SequenceStatus
from support.engines import HashRunner, expected_output, make_request, make_scheduler, step


def run_all(
    scheduler: Scheduler, runner: HashRunner, requests: list[Request]
) -> tuple[dict[int, list[int]], list[SchedulerOutput]]:
    """Every request's tokens, each emitted once, and all steps."""
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    outputs = []
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.check_integrity()
        outputs.append(output)
        for update in scheduler.update(output, runner.execute(output)):
            assert update.token is not None
            tokens[update.request_id].append(update.token.token_id)
    return tokens, outputs


def contenders(num_requests: int = 3, max_tokens: int = 12, **params: Any) -> list[Request]:
    return [make_request(prompt=[value] * 5, max_tokens=max_tokens, **params) for value in range(num_requests)]


@pytest.mark.parametrize(("preemption", "num_host_blocks"), [("recompute", 0), ("swap", 8), ("swap", 2)])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_tiny_pool_preempts_the_latest_and_changes_no_output(
    preemption: str, num_host_blocks: int, prefix_caching: bool
) -> None:
    scheduler = make_scheduler(6, num_host_blocks, preemption=preemption, prefix_caching=prefix_caching)
    runner = HashRunner(6, 4, num_host_blocks)
    requests = contenders()
    for request in requests:
        scheduler.add(request)
    tokens, outputs = run_all(scheduler, runner, requests)
    preempted = [request_id for output in outputs for request_id in output.preempted_request_ids]
    assert preempted
    assert requests[0].request_id not in preempted
    for request in requests:
        assert tokens[request.request_id] == expected_output(request.prompt_token_ids, 12)
    assert scheduler.num_free_blocks == 6


def test_swap_copies_the_victims_blocks_out_and_back_in_order() -> None:
    scheduler, runner = make_scheduler(4, 4, preemption="swap", max_num_seqs=2), HashRunner(4, 4, 4)
    first, second = contenders(2, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    _, outputs = run_all(scheduler, runner, [first, second])
    copies = [output.block_copies for output in outputs if output.block_copies]
    # two blocks each; the first needs a third at its 9th token, when the second's two go to the host
    assert copies[0] == (BlockCopy(2, 0, is_swap_in=False), BlockCopy(3, 1, is_swap_in=False))
    assert [(copy.source, copy.is_swap_in) for copy in copies[1]] == [(0, True), (1, True)]
    assert sum(output.num_lost_tokens for output in outputs) == 0
    # nothing but the two prompts was computed more than a token at a time
    assert sum(len(row.token_ids) > 1 for output in outputs for row in output.rows) == 2


def test_tokens_lost_to_recomputation_are_counted_less_those_found_in_the_prefix_cache() -> None:
    lost = {}
    for prefix_caching in (True, False):
        scheduler, runner = make_scheduler(4, prefix_caching=prefix_caching, max_num_seqs=2), HashRunner(4, 4)
        requests = contenders(2, max_tokens=8)
        for request in requests:
            scheduler.add(request)
        _, outputs = run_all(scheduler, runner, requests)
        lost[prefix_caching] = sum(output.num_lost_tokens for output in outputs)
        num_computed = sum(output.num_tokens for output in outputs)
        num_hits = sum(output.num_prefix_hit_tokens for output in outputs)
        assert num_computed == 2 * 12 + lost[prefix_caching]
        assert lost[prefix_caching] == 8 - num_hits
    assert lost[False] == 8
    assert lost[True] <= 8


def test_a_victim_keeps_its_place_before_those_that_came_later() -> None:
    scheduler, runner = make_scheduler(6, max_num_seqs=3), HashRunner(6, 4)
    requests = contenders(3)
    for request in requests:
        scheduler.add(request)
    while not (preempted := step(scheduler, runner).preempted_request_ids):
        pass
    late = make_request(max_tokens=1)
    scheduler.add(late)
    waiting = [sequence.request_id for sequence in sorted(scheduler._waiting, key=lambda sequence: sequence.arrival)]
    assert waiting == [*preempted, late.request_id]
    _, outputs = run_all(scheduler, runner, [*requests, late])
    joined = [request_id for output in outputs for request_id in output.admitted_request_ids]
    assert joined.index(preempted[0]) < joined.index(late.request_id)


def test_after_max_preemptions_a_request_stays() -> None:
    scheduler, runner = make_scheduler(8, max_preemptions=1, max_num_seqs=4), HashRunner(8, 4)
    requests = contenders(8, max_tokens=20)
    for request in requests:
        scheduler.add(request)
    tokens, outputs = run_all(scheduler, runner, requests)
    preempted = [request_id for output in outputs for request_id in output.preempted_request_ids]
    assert preempted
    assert len(set(preempted)) == len(preempted)
    assert all(len(output) == 20 for output in tokens.values())


def test_nobody_is_let_in_just_to_be_driven_out_again() -> None:
    """While a preempted sequence waits, a block for each running one is kept free beside what it needs."""
    scheduler, runner = make_scheduler(6, max_num_seqs=3, admission_headroom=0.0), HashRunner(6, 4)
    requests = contenders(3)
    for request in requests:
        scheduler.add(request)
    num_free_at_return = []
    while scheduler.has_work:
        num_preempted = scheduler._waiting.num_preempted
        output = step(scheduler, runner)
        others = len(output.rows) - len(output.admitted_request_ids)
        if output.admitted_request_ids and num_preempted and others:
            num_free_at_return.append((scheduler._cache.num_unpromised, others))
    assert all(num_free >= others - 1 for num_free, others in num_free_at_return)


def test_guaranteed_no_evict_reserves_and_never_preempts() -> None:
    scheduler, runner = make_scheduler(6, admission="guaranteed_no_evict"), HashRunner(6, 4)
    requests = contenders(3)
    for request in requests:
        scheduler.add(request)
    tokens, outputs = run_all(scheduler, runner, requests)
    assert not any(output.preempted_request_ids for output in outputs)
    # 5 + 12 tokens are 5 blocks of 6: one at a time
    assert {len(output.rows) for output in outputs} == {1}
    assert all(len(output) == 12 for output in tokens.values())


def test_a_long_prompt_is_let_in_only_when_all_of_it_fits_so_that_chunks_never_meet_a_full_pool() -> None:
    scheduler, runner = make_scheduler(8, max_num_batched_tokens=8), HashRunner(8, 4)
    long = [make_request(prompt=[value] * 18, max_tokens=2) for value in range(2)]
    for request in long:
        scheduler.add(request)
    _, outputs = run_all(scheduler, runner, long)
    assert not any(output.preempted_request_ids for output in outputs)
    assert max(len(output.rows) for output in outputs) == 1


def test_a_paused_request_gives_up_slot_and_blocks_and_goes_on_where_it_was() -> None:
    scheduler, runner = make_scheduler(6, 6, preemption="swap", max_num_seqs=1), HashRunner(6, 4, 6)
    slow, other = make_request([1] * 5, 8), make_request([2] * 5, 8)
    scheduler.add(slow)
    for _ in range(3):
        step(scheduler, runner)
    assert scheduler.pause(slow.request_id)
    assert scheduler.num_free_blocks == 6
    assert not scheduler.has_work
    scheduler.add(other)
    while scheduler.has_work:
        assert [row.request_id for row in step(scheduler, runner).rows] == [other.request_id]
    assert scheduler.resume(slow.request_id)
    tokens, outputs = run_all(scheduler, runner, [slow])
    assert tokens[slow.request_id] == expected_output([1] * 5, 8)[3:]
    assert sum(output.num_lost_tokens for output in outputs) == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("state", ["preempted", "paused"])
def test_a_cancel_of_one_that_is_out_of_the_batch_returns_its_blocks(preemption: str, state: str) -> None:
    scheduler, runner = make_scheduler(4, 4, preemption=preemption, max_num_seqs=2), HashRunner(4, 4, 4)
    first, second = contenders(2, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    if state == "preempted":
        while not step(scheduler, runner).preempted_request_ids:
            pass
    else:
        step(scheduler, runner)
        scheduler.pause(second.request_id)
        step(scheduler, runner)
    sequence = scheduler.find(second.request_id)
    assert sequence is not None
    assert bool(sequence.host_block_table) == (preemption == "swap")
    assert scheduler.finish(second.request_id, FinishReason.CANCELLED)
    scheduler.check_integrity()
    assert not sequence.host_block_table
    run_all(scheduler, runner, [first])
    assert scheduler.num_free_blocks == 4


def test_a_failed_step_costs_those_on_the_host_what_they_had_but_not_their_lives() -> None:
    scheduler, runner = make_scheduler(4, 4, preemption="swap", max_num_seqs=2), HashRunner(4, 4, 4)
    first, second = contenders(2, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    while not (output := scheduler.schedule()).swapped_out_request_ids:
        scheduler.update(output, runner.execute(output))
    # the runner raised before it copied anything
    assert scheduler.abandon(output) == [first.request_id]
    scheduler.check_integrity()
    sequence = scheduler.find(second.request_id)
    assert sequence is not None
    assert (sequence.status, sequence.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    num_before = sequence.num_output_tokens
    tokens, _ = run_all(scheduler, runner, [second])
    assert tokens[second.request_id] == expected_output(second.prompt_token_ids, 8)[num_before:]
