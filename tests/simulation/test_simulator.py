"""The simulator against what can be worked out by hand."""

from __future__ import annotations

import pytest

from noria.config import EngineConfig
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.records import Outcome
from noria.simulation.requests import SimRequest, make_requests, with_shared_prefix
from noria.simulation.simulator import Simulator
from noria.simulation.summary import SimulationResult
from noria_bench.arrivals import all_at_once, poisson
from noria_bench.lengths import UniformLength, draw_lengths
from noria_bench.slo import Objectives

# every step takes a second, whatever is in it
ONE_SECOND = MeasuredCostModel(((1, 1.0),))


def simulate(
    requests: list[SimRequest], num_blocks: int = 1024, concurrency: int | None = None, **config: object
) -> SimulationResult:
    settings = {"max_num_seqs": 4, "block_size": 4} | config
    simulator = Simulator(EngineConfig(**settings), num_blocks, ONE_SECOND)  # type: ignore[arg-type]
    return simulator.run(requests, concurrency)


def requests_of(outputs: list[int], **values: object) -> list[SimRequest]:
    return [SimRequest(0.0, 5, output, **values) for output in outputs]  # type: ignore[arg-type]


def test_static_four_requests_take_500_steps_and_a_third_of_the_slots_is_useful() -> None:
    result = simulate(requests_of([20, 50, 100, 500]), batching_mode="static")
    counters = result.counters
    assert (counters.steps, counters.slot_steps, counters.rows, counters.useful_slot_steps) == (500, 2000, 2000, 670)
    assert counters.totals.slot_utilisation == 0.335
    assert result.wall_s == 500
    assert result.summary().output_tokens_per_s == 670 / 500


def test_with_outputs_of_one_length_continuous_batching_gains_nothing() -> None:
    requests = requests_of([30] * 32)
    static, inflight = (simulate(requests, batching_mode=mode) for mode in ("static", "inflight"))
    assert static.wall_s == inflight.wall_s == 8 * 30


def test_with_outputs_of_many_lengths_it_gains_the_longest_of_a_batch_over_the_mean() -> None:
    outputs = draw_lengths(UniformLength(1, 64), 120, seed=1)
    static, inflight = (simulate(requests_of(outputs), batching_mode=mode) for mode in ("static", "inflight"))
    ideal = sum(max(outputs[i : i + 4]) for i in range(0, 120, 4)) / (sum(outputs) / 4)
    assert static.wall_s / inflight.wall_s == pytest.approx(ideal, rel=0.05)


def test_the_times_of_one_request() -> None:
    record = simulate([SimRequest(3.25, 5, 4)]).records[0]
    assert record.token_times_s == (4.25, 5.25, 6.25, 7.25)
    assert (record.queue_s, record.ttft_s, record.tpot_s, record.e2e_s, record.max_gap_s) == (0, 1, 1, 4, 1)
    assert record.outcome is Outcome.FINISHED


def test_a_request_that_comes_during_a_step_joins_the_next() -> None:
    records = simulate([SimRequest(0.0, 5, 4), SimRequest(0.5, 5, 1), SimRequest(1.0, 5, 1)]).records
    assert [record.first_scheduled_s for record in records] == [0, 1, 1]


def test_a_static_batch_waits_half_a_second_for_a_fourth() -> None:
    records = simulate([SimRequest(0.25 * i, 5, 2) for i in range(3)], batching_mode="static").records
    assert [record.first_scheduled_s for record in records] == [0.5] * 3


def test_a_request_ends_before_its_max_tokens_and_keeps_blocks_for_all_of_them() -> None:
    # 16 blocks of 4 tokens hold two reservations of 5 + 20 tokens, or six sequences of 5 + 4
    requests = requests_of([4] * 4, max_tokens=20)
    reserved = simulate(requests, num_blocks=16, admission="guaranteed_no_evict")
    optimistic = simulate(requests, num_blocks=16, admission="max_utilization")
    assert all(record.num_output_tokens == 4 for record in (*reserved.records, *optimistic.records))
    assert (reserved.counters.steps, optimistic.counters.steps) == (8, 4)


def test_preempted_requests_are_counted_and_get_all_their_tokens() -> None:
    result = simulate(requests_of([40] * 4), num_blocks=16, admission_headroom=0.0)
    assert [record.num_output_tokens for record in result.records] == [40] * 4
    assert result.counters.preemptions == sum(record.num_preemptions for record in result.records) > 0
    assert result.counters.recomputed_tokens > 0


def test_swapping_loses_no_tokens_and_costs_the_copies() -> None:
    config = EngineConfig(max_num_seqs=4, block_size=4, preemption="swap", admission_headroom=0.0)
    cost_model = MeasuredCostModel(((1, 1.0),), per_block_copy_s=0.25)
    result = Simulator(config, 16, cost_model, num_host_blocks=64).run(requests_of([40] * 4))
    counters = result.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens == 0
    assert [record.num_output_tokens for record in result.records] == [40] * 4
    assert result.wall_s > counters.steps + 0.25


def test_a_full_queue_refuses_and_a_deadline_ends_and_neither_is_good() -> None:
    requests = [*requests_of([10] * 5), SimRequest(0.0, 5, 2, timeout_s=3.0), *requests_of([10] * 4)]
    result = simulate(requests, max_queue_size=2)
    outcomes = [record.outcome for record in result.records]
    assert outcomes == [*[Outcome.FINISHED] * 5, Outcome.DEADLINE, *[Outcome.REJECTED] * 4]
    assert "max_queue_size" in (result.records[-1].error or "")
    assert result.records[5].ended_s == 3
    summary = result.summary(Objectives(ttft_s=5.0))
    assert (summary.num_finished, summary.num_deadline, summary.num_rejected) == (5, 1, 4)
    assert (summary.good_share, summary.good_requests_per_s) == (0.4, 4 / 20)
    assert summary.output_tokens_per_s == 50 / 20


def test_a_request_that_could_never_fit_is_refused_and_the_next_batch_goes() -> None:
    requests = [SimRequest(0.0, 5000, 1), SimRequest(0.0, 5, 1)]
    records = simulate(requests, batching_mode="static", max_num_seqs=1).records
    assert [record.outcome for record in records] == [Outcome.REJECTED, Outcome.FINISHED]


def test_a_closed_loop_sends_when_an_answer_has_come() -> None:
    records = simulate(requests_of([3, 5, 2]), concurrency=2).records
    assert [record.sent_s for record in records] == [0, 0, 3]


def test_prefixes_hit_only_where_they_are_shared() -> None:
    requests = make_requests(all_at_once(8), [41] * 8, [1] * 8)
    assert simulate(requests, max_num_seqs=1).counters.prefix_hit_tokens == 0
    shared = with_shared_prefix(requests, 20, share=1.0, seed=0)
    counters = simulate(shared, max_num_seqs=1).counters
    assert (counters.prefix_tokens, counters.prefix_hit_tokens) == (8 * 41, 7 * 20)


@pytest.mark.parametrize("mode", ["static", "dynamic", "inflight"])
def test_a_run_repeats_itself(mode: str) -> None:
    law = UniformLength(1, 40)
    requests = make_requests(poisson(30, 0.2, seed=3), draw_lengths(law, 30, 1), draw_lengths(law, 30, 2))
    first, second = (simulate(requests, num_blocks=64, batching_mode=mode) for _ in range(2))
    assert first == second
    assert first.summary().num_finished == 30


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        simulate([], concurrency=0)
    with pytest.raises(ValueError, match="max_tokens"):
        SimRequest(0.0, 5, 4, max_tokens=3)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        SimRequest(0.0, 5, 4, prompt_token_ids=(1,))
    assert simulate([]).summary().output_tokens_per_s is None
