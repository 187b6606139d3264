"""The capacity at an SLO: it brackets the rate where the SLO breaks, and says how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.errors import BenchError
from noria_bench.plain_run import plain_run
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.slo import PRESETS, parse_slo
from noria_bench.sweep import Bracket, Probe, capacity_of, find_bracket, probe_of

SLO = {"default": parse_slo("ttft_p95=2")}
TEXT = "ttft_p95=2"


def server(breaks_above):
    """A server that breaks above a rate; notes what was tried."""
    tried = []

    def try_rate(rate):
        tried.append(rate)
        return Probe(rate, "ttft_p95", rate / breaks_above)

    try_rate.tried = tried
    return try_rate


@pytest.mark.parametrize("breaks_above", [0.11, 0.5, 1.0, 3.7])
def test_the_bracket_holds_the_rate_and_is_as_narrow_as_asked(breaks_above):
    bracket = find_bracket(server(breaks_above), 0.1, 10.0, resolution=0.1)
    assert bracket.kept <= breaks_above < bracket.broken
    assert bracket.broken / bracket.kept <= 1.1
    assert bracket.broken_by == "ttft_p95"


def test_doubling_ends_at_the_highest_rate():
    try_rate = server(100)
    assert find_bracket(try_rate, 1.0, 5.0, 0.1) == Bracket(5.0, None, None, 4)
    assert try_rate.tried == [1.0, 2.0, 4.0, 5.0]


def test_a_server_that_cannot_keep_the_lowest_rate():
    bracket = find_bracket(server(0.05), 0.1, 10.0, 0.1)
    assert bracket == Bracket(None, 0.1, "ttft_p95", 1)
    capacity = capacity_of("static", TEXT, [bracket])
    assert (capacity.rate, capacity.broken_by, capacity.is_bounded) == (None, "ttft_p95", True)


def test_the_interval_covers_repeats_and_brackets():
    brackets = [Bracket(kept, kept * 1.05, "ttft_p95", 5) for kept in (0.9, 1.0, 1.1)]
    capacity = capacity_of("inflight", TEXT, brackets)
    assert capacity.rate == pytest.approx((0.9 * 1.0 * 1.1) ** (1 / 3))
    # Student's t of two degrees of freedom over the logarithms
    spread = math.sqrt(sum((math.log(k) - math.log(capacity.rate)) ** 2 for k in (0.9, 1.0, 1.1)) / 2)
    assert capacity.high == pytest.approx(capacity.rate * math.exp(4.3027 * spread / math.sqrt(3)), rel=1e-4)
    assert capacity.low == pytest.approx(capacity.rate**2 / capacity.high)
    assert capacity.num_runs == 15


def test_one_repeat_has_its_bracket():
    capacity = capacity_of("inflight", TEXT, [Bracket(1.0, 1.08, "tpot_p95", 6)])
    assert (capacity.low, capacity.rate) == (1.0, 1.0)
    assert capacity.high == pytest.approx(1.08)


def test_an_unbroken_sweep_has_no_upper_bound():
    capacity = capacity_of("inflight", TEXT, [Bracket(5.0, None, None, 4), Bracket(5.0, None, None, 4)])
    assert (capacity.rate, capacity.high, capacity.is_bounded) == (pytest.approx(5.0), None, False)


def records(*ttfts_s, outcome=Outcome.FINISHED):
    return [
        RequestRecord(index, 0.0, ttft_s, 3, (Chunk(ttft_s, 1),), outcome=outcome)
        for index, ttft_s in enumerate(ttfts_s)
    ]


def test_requests_that_did_not_finish_take_for_ever():
    run = plain_run("inflight", [])
    assert probe_of(1.0, SLO, run, records(*[1.0] * 20)).is_kept
    assert probe_of(1.0, SLO, run, records(*[1.0] * 20)).excess == pytest.approx(0.5)
    rejected = records(1.0, 1.0, outcome=Outcome.REJECTED)
    assert not probe_of(1.0, SLO, run, records(*[1.0] * 20) + rejected).is_kept


def test_the_queue_time_is_the_servers():
    slo = {"default": parse_slo("queue_p95=2,ttft_p95=10")}
    run = plain_run("inflight", records(1.0), EngineCounters(steps=1), Distribution(1.0, 3.0, 4.0))
    probe = probe_of(1.0, slo, run, records(1.0))
    assert (probe.worst_key, probe.excess) == ("queue_p95", 1.5)
    with pytest.raises(BenchError, match="queue_p95 cannot be had"):
        probe_of(1.0, slo, plain_run("inflight", records(1.0)), records(1.0))


def test_a_queue_time_is_endless_where_too_many_never_ran():
    """The server's histogram holds only those that did."""
    slo = {"default": parse_slo("queue_p95=2")}
    some = records(*[1.0] * 10) + records(1.0, outcome=Outcome.REJECTED)
    run = plain_run("inflight", some, EngineCounters(steps=1), Distribution(0.1, 0.2, 0.3))
    assert probe_of(1.0, slo, run, records(1.0)).is_kept
    assert not probe_of(1.0, slo, run, some).is_kept


def test_intended_cancels_are_not_judged():
    """Each counted as one that took for ever, so that no rate was ever kept."""
    some = records(1.0, 1.0) + records(1.0, outcome=Outcome.CANCELLED)
    assert probe_of(1.0, SLO, plain_run("inflight", []), some).is_kept


def test_the_class_that_suffers_most_decides():
    some = [replace(record, request_class=name) for name in ("chat", "batch") for record in records(1.0)]
    slos = {"chat": parse_slo("ttft_p95=0.5"), "batch": parse_slo("ttft_p95=10")}
    assert probe_of(1.0, slos, plain_run("inflight", []), some).excess == 2.0
    del slos["chat"]
    assert probe_of(1.0, slos, plain_run("inflight", []), some).excess == pytest.approx(0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_slos(name):
    assert parse_slo(name).limits_s
    objectives = parse_slo(name).per_request()
    assert objectives is not None
    assert objectives.ttft_s


def test_nothing_of_a_queue_can_be_asked_of_one_request():
    """It counted every finished request as within the SLO."""
    assert parse_slo("queue_p95=1").per_request() is None
