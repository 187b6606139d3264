"""Several replicas, and how their number follows the load."""

from __future__ import annotations

import pytest

from noria.config import EngineConfig
from noria.simulation.autoscaling import Autoscaling
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.fleet import FleetResult, LeastOutstandingTokens, ReplicaLife, RoundRobin, Router, run_fleet
from noria.simulation.replica import Replica
from noria.simulation.requests import SimRequest
from noria_bench.slo import Objectives

ONE_SECOND = MeasuredCostModel(((1, 1.0),))
CONFIG = EngineConfig(max_num_seqs=2, block_size=4)


def build_replica(number: int) -> Replica:
    return Replica(CONFIG, 256, ONE_SECOND, number=number)


def serve(
    requests: list[SimRequest], num_replicas: int, router: Router | None = None, rule: Autoscaling | None = None
) -> FleetResult:
    return run_fleet(requests, build_replica, num_replicas, router or LeastOutstandingTokens(), rule)


def rush(num: int, gap_s: float, start_s: float = 0.0) -> list[SimRequest]:
    return [SimRequest(start_s + index * gap_s, 5, 20) for index in range(num)]


def test_round_robin_deals_out_in_turn_and_the_other_router_looks_at_the_tokens() -> None:
    requests = [SimRequest(0.0, 5, output) for output in (50, 5, 5, 5)]
    for router, expected in ((RoundRobin(), [0, 1, 0, 1]), (LeastOutstandingTokens(), [0, 1, 1, 1])):
        records = serve(requests, 2, router).simulation.records
        assert [record.replica for record in records] == expected


def test_replicas_serve_side_by_side_and_cost_their_time() -> None:
    one, two = (serve(rush(8, 0.0), number) for number in (1, 2))
    assert (one.simulation.wall_s, two.simulation.wall_s) == (80, 40)
    assert (one.replica_seconds, two.replica_seconds) == (80, 80)
    assert two.simulation.counters.useful_slot_steps == one.simulation.counters.useful_slot_steps == 160


def test_a_new_replica_is_paid_for_while_it_loads_and_serves_when_it_is_ready() -> None:
    rule = Autoscaling(max_replicas=2, max_waiting=1, interval_s=10, load_time_s=25, idle_s=1000)
    result = serve(rush(12, 5.0), 1, rule=rule)
    # at 20 s the third and fourth to wait are there: one replica becomes two
    assert result.lives[1] == ReplicaLife(20, 45, result.lives[0].stopped_s)
    assert min(record.sent_s for record in result.simulation.records if record.replica == 1) == 45


def test_the_worst_of_the_three_limits_decides() -> None:
    replica = build_replica(0)
    for index in range(6):
        replica.submit(index, SimRequest(0.0, 39, 20), now=0.0)
    replica.advance(0.0)
    # two run with 39 tokens and 10 blocks each, four wait
    assert (replica.num_waiting, replica.num_running_tokens, replica.kv_share) == (4, 78, 20 / 256)
    assert Autoscaling(9, max_waiting=2).num_wanted([replica]) == 2
    assert Autoscaling(9, max_waiting=2, max_running_tokens=30).num_wanted([replica]) == 3
    assert Autoscaling(9, max_kv_share=0.01).num_wanted([replica]) == 8
    assert Autoscaling(3, max_kv_share=0.01).num_wanted([replica]) == 3
    assert Autoscaling(9, max_waiting=4).num_wanted([replica]) == 1


def test_idle_replicas_are_stopped_down_to_the_least_number() -> None:
    rule = Autoscaling(max_replicas=3, min_replicas=2, max_waiting=100, interval_s=10, idle_s=50)
    result = serve([*rush(6, 0.0), *rush(1, 0.0, start_s=200.0)], 3, rule=rule)
    assert [life.stopped_s for life in result.lives] == [220, 220, 70]


def test_scaling_late_loses_goodput_against_scaling_early() -> None:
    calm, crowd = rush(10, 12.0), rush(80, 3.0, start_s=120.0)
    objectives = Objectives(ttft_s=30.0)
    shares = {}
    for max_waiting in (1, 12):
        rule = Autoscaling(max_replicas=4, max_waiting=max_waiting, interval_s=10, load_time_s=40, idle_s=1000)
        shares[max_waiting] = serve([*calm, *crowd], 1, rule=rule).simulation.summary(objectives).good_share
    assert shares[1] > 1.2 * shares[12]


def test_a_fleet_repeats_itself() -> None:
    rule = Autoscaling(max_replicas=3, max_waiting=2, interval_s=10, load_time_s=20, idle_s=30)
    assert serve(rush(40, 4.0), 1, rule=rule) == serve(rush(40, 4.0), 1, rule=rule)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas"):
        serve([], 0)
    with pytest.raises(ValueError, match="min_replicas"):
        Autoscaling(max_replicas=1, min_replicas=2)
    with pytest.raises(ValueError, match="max_waiting"):
        Autoscaling(max_replicas=1, max_waiting=0)
    with pytest.raises(ValueError, match="idle_s"):
        Autoscaling(max_replicas=1, idle_s=-1)
