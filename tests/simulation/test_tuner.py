"""The tuner: what an SLO says of a run, which configurations are tried, and that the best is found and refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.simulation.batch_former import DynamicBatching
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.records import Outcome, RequestRecord
from noria.simulation.requests import SimRequest, with_shared_prefix
from noria.simulation.trial import Bench, Measurement, Trial, time_alone
from noria.simulation.tuner import TOLERANCE, RateSearch, Tuner, TuningResult
from noria.simulation.tuning_space import Candidate, TuningSpace
from noria_bench.errors import BenchError
from noria_bench.slo import KEYS, latency_figure, parse_slo

ONE_SECOND = MeasuredCostModel(((1, 1.0),))
BASES = {mode: EngineConfig(batching_mode=mode) for mode in ("inflight", "static", "dynamic")}
REQUESTS = [SimRequest(0.0, 8, output) for output in (2, 4, 6)]


def record(sent_s: float, *token_times_s: float, outcome: Outcome = Outcome.FINISHED) -> RequestRecord:
    return RequestRecord(0, 0, outcome, sent_s, sent_s, token_times_s, 9.0, 1)


def test_an_slo_is_read_and_says_what_is_worst() -> None:
    slo = parse_slo("ttft_p95=2, tpot_mean=0.25")
    assert slo.limits_s == {"ttft_p95": 2.0, "tpot_mean": 0.25}
    assert str(slo) == "ttft_p95=2,tpot_mean=0.25"
    assert slo.worst({"ttft_p95": 1.0, "tpot_mean": 0.5, "e2e_p50": 9.0}) == ("tpot_mean", 2.0)


@pytest.mark.parametrize("text", ["ttft=2", "ttft_p90=2", "", "ttft_p95=2,,"])
def test_an_unknown_key_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(BenchError, match=f"keys of {KEYS[0]}, .*max_gap_mean"):
        parse_slo(text)


@pytest.mark.parametrize("value", ["", "0", "-1", "inf", "nan", "fast"])
def test_a_limit_must_be_a_number_of_seconds(value: str) -> None:
    with pytest.raises(BenchError, match="ttft_p95 must be a finite number of seconds"):
        parse_slo(f"ttft_p95={value}")


def test_figures_by_hand() -> None:
    records = [record(0, 1, 2, 4), record(0, 3), record(1, 3, 4)]
    figures = {key: latency_figure(records, key) for key in KEYS}
    assert figures["ttft_p50"] == 2
    assert figures["ttft_mean"] == 2
    # the request of one token has no tpot and no gaps
    assert figures["tpot_mean"] == (1.5 + 1) / 2
    assert figures["icl_mean"] == pytest.approx((1 + 2 + 1) / 3)
    assert figures["max_gap_p50"] == 1.5
    assert figures["e2e_p50"] == 3
    assert latency_figure([record(0, 3)], "tpot_p99") == 0


def test_a_request_that_failed_took_for_ever() -> None:
    records = [*(record(0, 1) for _ in range(9)), record(0, outcome=Outcome.REJECTED)]
    assert latency_figure(records, "ttft_p50") == 1
    assert latency_figure(records, "ttft_p95") == latency_figure(records, "icl_mean") == math.inf


def space_of(num_blocks: int = 10_000, requests: list[SimRequest] = REQUESTS, *modes: str) -> TuningSpace:
    return TuningSpace({mode: BASES[mode] for mode in modes or BASES}, num_blocks, requests)


def reachable(space: TuningSpace) -> list[Candidate]:
    """The starts, and what is two knobs away."""
    near = [one for start in space.starts() for one in space.neighbours(start)]
    return [*space.starts(), *near, *(one for other in near[::7] for one in space.neighbours(other))]


def test_a_search_starts_with_what_there_is_and_every_mode() -> None:
    starts = space_of().starts()
    assert starts[0] == Candidate(BASES["inflight"])
    assert {one.config.batching_mode for one in starts} == set(BASES)
    assert [one for one in starts if starts.count(one) > 1] == []


def test_no_more_slots_than_the_blocks_hold() -> None:
    # 3 blocks for a mean request of 33 tokens and 4 for the longest of 60, of 100: 33 in flight, 25 in a closed batch
    requests = [SimRequest(0.0, 5, 1), SimRequest(0.0, 30, 30)]
    for candidate in reachable(space_of(100, requests)):
        limit = 33 if candidate.batching is None else 25
        assert candidate.config.max_num_seqs <= limit
        if candidate.batching is not None:
            assert candidate.batching.max_batch_size == candidate.config.max_num_seqs


def test_whole_prompts_only_where_a_step_holds_the_longest_request() -> None:
    whole = [
        one.config for one in reachable(space_of(10_000, [SimRequest(0.0, 1000, 30)])) if not one.config.chunked_prefill
    ]
    assert whole
    for config in whole:
        assert min(config.max_num_batched_tokens, config.max_prefill_tokens or 2**20) >= 1030


def test_neighbours_differ_in_one_knob() -> None:
    start = Candidate(replace(BASES["inflight"], max_num_seqs=16, max_num_batched_tokens=256))
    changes = [
        {name for name, value in one.knobs.items() if value != start.knobs[name]}
        for one in space_of().neighbours(start)
    ]
    assert {frozenset(change) for change in changes} == {
        frozenset(names)
        for names in (
            {"max_num_seqs"},
            {"max_num_batched_tokens"},
            {"max_prefill_tokens"},
            {"prefill_batching"},
            {"chunked_prefill"},
            {"chunked_prefill", "prefill_batching"},
            {"prefill_order"},
            {"admission"},
            {"admission_headroom"},
            {"insertion"},
        )
    }


def test_closed_modes_vary_size_delay_and_preferred_sizes() -> None:
    space = space_of(10_000, REQUESTS, "dynamic")
    start = Candidate(replace(BASES["dynamic"], max_num_seqs=4), DynamicBatching(4, (2, 4), 0.01))
    assert [one.batching for one in space.neighbours(start)] == [
        DynamicBatching(2, (1, 2), 0.01),
        DynamicBatching(8, (4, 8), 0.01),
        DynamicBatching(1, (1,), 0.01),
        DynamicBatching(16, (8, 16), 0.01),
        DynamicBatching(32, (16, 32), 0.01),
        DynamicBatching(4, (2, 4), 100e-6),
        DynamicBatching(4, (2, 4), 0.05),
        DynamicBatching(4, (), 0.01),
    ]


def test_a_request_that_does_not_fit_is_named_before_anything_is_simulated() -> None:
    with pytest.raises(ConfigError, match="a request may come to 38 tokens, more than the 32 that fit"):
        space_of(2, [SimRequest(0.0, 8, 4, max_tokens=30)])
    with pytest.raises(ConfigError, match="more than the 10 that fit"):
        TuningSpace({"inflight": EngineConfig(max_model_len=10)}, 100, REQUESTS)


def bench_of(slo: str, requests: list[SimRequest] = REQUESTS) -> Bench:
    return Bench(requests, parse_slo(slo), ONE_SECOND, num_blocks=1000, alone_s=4.0)


def test_one_alone_takes_its_tokens() -> None:
    assert time_alone(REQUESTS, Candidate(BASES["inflight"]), 1000, ONE_SECOND) == 4.0


def test_a_run_is_the_same_again_and_reports_what_is_asked_and_the_usual() -> None:
    bench = bench_of("e2e_p50=8")
    run = bench(Trial(Candidate(BASES["inflight"]), 0.2))
    assert run == bench(Trial(Candidate(BASES["inflight"]), 0.2))
    assert set(run.figures) == {"e2e_p50", "ttft_p95", "tpot_p95"}
    assert (run.worst_key, run.is_kept) == ("e2e_p50", True)
    assert run.excess == run.figures["e2e_p50"] / 8


def test_a_queue_that_only_grows_is_not_kept_though_tokens_come_in_time() -> None:
    # 8 slots and 4 steps a request: 2 requests a second at most
    bench = bench_of("tpot_p95=1.5")
    assert bench(Trial(Candidate(BASES["inflight"]), 1.5)).is_kept
    overloaded = bench(Trial(Candidate(BASES["inflight"]), 3.0))
    assert overloaded.figures["tpot_p95"] <= 1.5
    assert not overloaded.is_kept


def test_runs_are_long_enough_for_their_limits_and_never_repeat_a_prompt_with_tokens_of_its_own() -> None:
    bench = bench_of("ttft_p95=100")
    assert [bench.num_requests(0.1, is_long) for is_long in (False, True)] == [200, 600]
    assert [bench.num_requests(0.4, is_long) for is_long in (False, True)] == [400, 1200]
    shared = with_shared_prefix(REQUESTS * 50, 4, 1.0, seed=0)
    assert bench_of("ttft_p95=100", shared).num_requests(0.4, is_long=True) == 150


def test_the_highest_rate_is_found_from_either_side() -> None:
    for start in (0.5, 3.6, 40.0):
        search = RateSearch(Trial(Candidate(BASES["inflight"]), start))
        while not search.is_done:
            search.note(search.trial.rate <= 3.7)
        assert 3.7 / (1 + TOLERANCE) <= search.low <= 3.7


def tune(capacity: Callable[[Candidate, int], float], *modes: str, slo: str = "ttft_p95=1") -> TuningResult:
    """With runs that keep the SLO up to a rate of `capacity`, by candidate and seed; latencies grow with the rate."""

    def run(trial: Trial) -> Measurement:
        excess = trial.rate / capacity(trial.candidate, trial.seed)
        return Measurement(trial, {"ttft_p95": excess, "tpot_p95": excess}, "ttft_p95", excess)

    class FakeBench(SimpleNamespace):
        def __call__(self, trial: Trial) -> Measurement:
            return run(trial)

    bench: Any = FakeBench(slo=parse_slo(slo), usual_rate=1.0, lowest_rate=0.04)
    return Tuner(space_of(10_000, REQUESTS, *modes), bench).run()


def peak(candidate: Candidate) -> float:
    """Best with 32 slots, 1,024 tokens, separate prompts; every factor of two away from it costs a fifth."""
    config = candidate.config
    if candidate.batching is not None:
        return 2.0
    distance = abs(math.log2(config.max_num_seqs / 32)) + abs(math.log2(config.max_num_batched_tokens / 1024))
    return 20 * 0.8**distance * (1.1 if config.prefill_batching == "separate" else 1.0)


def test_the_best_is_found_within_the_tolerance() -> None:
    result = tune(lambda candidate, seed: peak(candidate))
    config = result.best.config
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.prefill_batching) == (32, 1024, "separate")
    assert 22 / (1 + TOLERANCE) <= result.rate <= 22
    assert result.rates == (result.rate,) * 3


def test_the_rate_is_one_that_every_seed_keeps() -> None:
    result = tune(lambda candidate, seed: peak(candidate) * (1, 0.8, 0.9)[seed])
    assert result.rate == min(result.rates)
    assert result.rates[1] < result.rates[2] < result.rates[0]
    assert all(run.is_kept and run.trial.rate == result.rate for run in result.winner)
    assert [run.trial.seed for run in result.winner] == [0, 1, 2]


def test_the_front_begins_with_the_winner_and_nobody_on_it_is_beaten() -> None:
    front = tune(lambda candidate, seed: peak(candidate)).front
    assert front[0].trial.is_long
    assert [run.trial.rate for run in front] == sorted((run.trial.rate for run in front), reverse=True)
    for run in front:
        others = [other for other in front if other is not run and other.trial.rate >= run.trial.rate]
        assert all(other.figures["ttft_p95"] > run.figures["ttft_p95"] for other in others)


def test_a_closed_mode_may_win() -> None:
    def capacity(candidate: Candidate, seed: int) -> float:
        return 0.3 if candidate.batching is None else candidate.batching.max_batch_size / 4

    best = tune(capacity, "inflight", "static").best
    assert best.batching is not None
    assert best.config.batching_mode == "static"
    assert best.batching.max_batch_size >= 256


def test_what_only_a_few_knobs_allow_is_reached_from_starts_that_do_not() -> None:
    def capacity(candidate: Candidate, seed: int) -> float:
        # kept at no rate worth the name but with small steps
        budget = candidate.config.max_num_batched_tokens
        return 1.0 if budget == 32 else 0.25 / budget

    result = tune(capacity, "inflight")
    assert result.best.config.max_num_batched_tokens == 32


def test_refused_with_what_is_broken_by_how_much_and_by_whom() -> None:
    with pytest.raises(ConfigError) as error:
        tune(lambda candidate, seed: 0.02 if candidate.config.max_num_seqs == 4 else 0.01)
    assert str(error.value).startswith(
        "no configuration keeps ttft_p95=1: even at 0.04 requests/s, where hardly two requests meet, the best has "
        "ttft_p95=2, 2 times what is asked for (inflight: 4 slots"
    )
