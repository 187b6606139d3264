"""When requests are sent and of which class they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from noria_bench.errors import BenchError
from noria_bench.lengths import ConstantLength
from noria_bench.ramps import RampPiece, num_expected, ramp_times
from noria_bench.schedule import arrange, at_rate
from noria_bench.workload_spec import Arrivals, ClassSpec, TraceSource, WorkloadSpec


def one(name: str = "default", **values: object) -> ClassSpec:
    return replace(ClassSpec(name, prompt_tokens=ConstantLength(1), output_tokens=ConstantLength(1)), **values)


def due(spec: WorkloadSpec, seed: int = 0) -> list[float]:
    return [slot.due_s for slot in arrange(spec, seed, {}) if slot.due_s is not None]


def test_a_closed_loop_has_no_times() -> None:
    assert [slot.due_s for slot in arrange(WorkloadSpec(3, (one(),)), 0, {})] == [None] * 3


@pytest.mark.parametrize(("law", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 3.0)])
def test_gaps_have_their_rate_and_variation_and_are_not_rescaled(law: str, cv: float) -> None:
    spec = WorkloadSpec(20_000, (one(),), Arrivals(law, rate=4.0, burstiness=3.0 if law == "gamma" else 1.0))
    gaps = np.diff(due(spec))
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.06)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, abs=0.15)
    # a stream that were rescaled would always end at n / rate
    ends = {round(due(spec, seed)[-1], 3) for seed in range(3)}
    assert (ends == {19_999 / 4}) if law == "constant" else (len(ends) == 3)


def test_another_rate_stretches_the_same_arrivals() -> None:
    spec = WorkloadSpec(50, (one(),), Arrivals("gamma", rate=1.0, burstiness=2.0))
    assert due(at_rate(spec, 4.0, {})) == pytest.approx([time / 4 for time in due(spec)])
    assert due(spec) == due(spec) != due(spec, seed=1)


@pytest.mark.parametrize("law", ["constant", "poisson", "gamma"])
def test_a_duration_ends_the_workload_before_or_after_its_number(law: str) -> None:
    spec = WorkloadSpec(None, (one(),), Arrivals(law, rate=2.0), duration_s=1000.0)
    times = due(spec)
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert 990 < times[-1] < 1000
    assert due(replace(spec, num_requests=10)) == times[:10]
    assert due(replace(spec, num_requests=10**6)) == times


def test_a_duration_is_filled_however_bursty_the_arrivals_are() -> None:
    """Drawn are a fifth more than expected; a bursty stream may need many more."""
    spec = WorkloadSpec(None, (one(),), Arrivals("gamma", rate=1.0, burstiness=20.0), duration_s=100.0)
    for seed in range(20):
        longer = due(replace(spec, duration_s=4000.0), seed)
        if longer[0] < 100:
            assert due(spec, seed) == [time for time in longer if time < 100]


def test_classes_come_by_their_shares() -> None:
    classes = (one("chat", share=3.0), one("code", share=1.0))
    spec = WorkloadSpec(8000, classes, Arrivals("poisson", rate=1.0))
    indices = [slot.class_index for slot in arrange(spec, 0, {})]
    assert np.mean(indices) == pytest.approx(0.25, abs=0.02)
    assert indices == [slot.class_index for slot in arrange(at_rate(spec, 9.0, {}), 0, {})]
    assert indices == [slot.class_index for slot in arrange(replace(spec, arrivals=Arrivals()), 0, {})]


def test_classes_with_rates_have_streams_of_their_own() -> None:
    classes = (one("chat", rate=3.0), one("code", rate=1.0))
    spec = WorkloadSpec(None, classes, Arrivals("poisson"), duration_s=2000.0)
    slots = arrange(spec, 0, {})
    times = [slot.due_s for slot in slots]
    assert times == sorted(times)
    for index, rate in enumerate((3.0, 1.0)):
        own = [slot.due_s for slot in slots if slot.class_index == index]
        assert len(own) == pytest.approx(2000 * rate, rel=0.06)
        # a class keeps its arrivals when another comes or goes
        assert own == due(WorkloadSpec(None, (classes[index],), Arrivals("poisson"), duration_s=2000.0))
    faster = at_rate(spec, 8.0, {})
    assert [one.rate for one in faster.classes] == [6.0, 2.0]
    assert [slot.class_index for slot in arrange(faster, 0, {})][:100] == [slot.class_index for slot in slots][:100]


def test_a_closed_loop_takes_class_rates_as_shares() -> None:
    spec = WorkloadSpec(4000, (one("chat", rate=0.3), one("code", rate=0.1)))
    assert np.mean([slot.class_index for slot in arrange(spec, 0, {})]) == pytest.approx(0.25, abs=0.03)


def test_traces_are_replayed_at_a_speed_and_merged() -> None:
    classes = tuple(ClassSpec(name, trace=TraceSource("never read")) for name in ("chat", "code"))  # type: ignore[arg-type]
    spec = WorkloadSpec(None, classes, Arrivals("trace", speed=2.0))
    recorded = {0: [0.0, 4.0, 6.0], 1: [0.0, 5.0]}
    slots = arrange(spec, 0, recorded)
    assert [(slot.class_index, slot.due_s) for slot in slots] == [(0, 0), (1, 0), (0, 2), (1, 2.5), (0, 3)]
    assert len(arrange(replace(spec, duration_s=2.5), 0, recorded)) == 3
    assert len(arrange(replace(spec, num_requests=2), 0, recorded)) == 2
    # five requests in 6 s are four gaps
    at_one = at_rate(spec, 1.0, recorded)
    assert [slot.due_s for slot in arrange(at_one, 0, recorded)] == pytest.approx([0, 0, 8 / 3, 10 / 3, 4])
    with pytest.raises(BenchError, match="come all at once"):
        at_rate(spec, 1.0, {0: [0.0], 1: [0.0]})


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((RampPiece(2, 2, 10),), 20),
        ((RampPiece(0, 4, 10),), 20),
        ((RampPiece(4, 0, 10),), 20),
        ((RampPiece(1, np.e, 10, is_exponential=True),), 10 * (np.e - 1)),
        ((RampPiece(2, 2, 10, is_exponential=True),), 20),
        ((RampPiece(1, 1, 10), RampPiece(0, 0, 5), RampPiece(3, 1, 10)), 30),
    ],
)
def test_a_ramp_brings_as_many_as_lie_beneath_it(pieces: tuple[RampPiece, ...], expected: float) -> None:
    assert num_expected(pieces) == pytest.approx(expected)
    step = 1 / 64
    times = ramp_times([place * step for place in range(10**5)], pieces)
    assert len(times) == pytest.approx(expected / step, abs=1)
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] <= sum(piece.seconds for piece in pieces)
    # the density of arrivals is the rate: check it in the middle of each piece
    start = 0.0
    for piece in pieces:
        middle = start + piece.seconds / 2
        density = step * sum(middle - 0.5 <= time < middle + 0.5 for time in times)
        factor = np.sqrt(piece.start_rate * piece.end_rate)
        mean = factor if piece.is_exponential else (piece.start_rate + piece.end_rate) / 2
        assert density == pytest.approx(mean, rel=0.03, abs=0.02)
        start += piece.seconds


def test_arrivals_in_a_ramp_keep_their_law() -> None:
    ramp = (RampPiece(1, 1, 2000), RampPiece(8, 8, 2000))
    times = np.asarray(due(WorkloadSpec(None, (one(),), Arrivals("gamma", burstiness=2.0, ramp=ramp))))
    for gaps, rate in ((np.diff(times[times < 2000]), 1), (np.diff(times[times >= 2000]), 8)):
        assert np.mean(gaps) == pytest.approx(1 / rate, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (WorkloadSpec(None, (one(),)), "num_requests must be given"),
        (WorkloadSpec(5, (one(),), duration_s=3.0), "duration needs an open loop"),
        (WorkloadSpec(5, (one(),), Arrivals("poisson")), "arrivals.law poisson needs one of arrivals.rate"),
        (WorkloadSpec(5, (one(rate=1.0),), Arrivals("poisson", rate=1.0)), "needs one of"),
        (WorkloadSpec(None, (one(),), Arrivals("poisson", rate=1.0)), "num_requests or duration must be given"),
        (WorkloadSpec(None, (one(),), Arrivals("poisson", rate=1e9), duration_s=9.0), "more than 1,000,000 requests"),
        (WorkloadSpec(10**7, (one(),), Arrivals("poisson", rate=1.0)), "more than 1,000,000 requests"),
        (WorkloadSpec(None, (one(),), Arrivals("poisson", rate=1e-9), duration_s=1.0), "has no request"),
    ],
)
def test_a_workload_without_an_end_or_a_beginning_is_refused(spec: WorkloadSpec, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        arrange(spec, 0, {})


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(BenchError, match="rate must be a finite number"):
        at_rate(WorkloadSpec(5, (one(),)), rate, {})


def test_a_ramp_takes_no_rate() -> None:
    with pytest.raises(BenchError, match=r"arrivals\.ramp"):
        at_rate(WorkloadSpec(None, (one(),), Arrivals("poisson", ramp=(RampPiece(1, 2, 3),))), 1.0, {})
