"""Which class each request is of, and when it is to be sent.

Times come from a process of one arrival a second that is stretched to the rate, so that another rate changes when
requests come, but not which, nor how many of what length. Nothing is rescaled to end at a round time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from noria_bench import arrivals
from noria_bench.chance import stream, stream_seed
from noria_bench.errors import BenchError
from noria_bench.ramps import num_expected, ramp_times
from noria_bench.workload_spec import CLOSED, CONSTANT, GAMMA, POISSON, TRACE, Arrivals, ClassSpec, WorkloadSpec

MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the order of requests. due_s: None in a closed loop."""

    class_index: int
    due_s: float | None = None


def arrange(spec: WorkloadSpec, seed: int, recorded: Mapping[int, Sequence[float]]) -> list[Slot]:
    """The requests of a spec in the order in which they are sent.

    recorded: by class, the arrivals of its trace in order; needed for arrivals by `trace` alone.
    Raises BenchError where the spec does not say how many there are, or how often they come.
    """
    check_extent(spec)
    if spec.arrivals.law == TRACE:
        slots = _merged({index: _times_of_trace(times, spec.arrivals.speed) for index, times in recorded.items()})
    elif spec.arrivals.is_open and has_class_rates(spec.classes):
        slots = _merged(
            {
                index: _times(replace(spec.arrivals, rate=one.rate), spec, stream_seed(seed, "arrivals", one.name))
                for index, one in enumerate(spec.classes)
            }
        )
    elif spec.arrivals.is_open:
        times = _times(spec.arrivals, spec, stream_seed(seed, "arrivals"))
        indices = _class_indices(spec.classes, len(times), seed)
        slots = [Slot(index, due_s) for index, due_s in zip(indices, times, strict=True)]
    else:
        slots = [Slot(index) for index in _class_indices(spec.classes, spec.num_requests or 0, seed)]
    if spec.duration_s is not None:
        end_s = spec.duration_s
        slots = list(takewhile(lambda slot: slot.due_s is None or slot.due_s < end_s, slots))
    if not slots:
        raise BenchError("the workload has no request: none arrives before it ends")
    return slots[: spec.num_requests]


def at_rate(spec: WorkloadSpec, rate: float, recorded: Mapping[int, Sequence[float]]) -> WorkloadSpec:
    """The spec with so many requests a second over all classes: a closed loop becomes Poisson, classes with rates keep
    their proportions, a trace its pattern. Raises BenchError."""
    if not 0 < rate < math.inf:
        raise BenchError(f"rate must be a finite number of requests a second above 0, not {rate}")
    if spec.arrivals.ramp:
        raise BenchError("rate: this workload's rate changes with its arrivals.ramp; only that can say how")
    if spec.arrivals.law == TRACE:
        slots = arrange(replace(spec, arrivals=replace(spec.arrivals, speed=1.0), duration_s=None), 0, recorded)
        span_s = (slots[-1].due_s or 0.0) - (slots[0].due_s or 0.0)
        if span_s == 0:
            raise BenchError("rate: the trace's requests come all at once, which no speed brings to a rate")
        return replace(spec, arrivals=replace(spec.arrivals, speed=rate * span_s / (len(slots) - 1)))
    law = POISSON if spec.arrivals.law == CLOSED else spec.arrivals.law
    if not has_class_rates(spec.classes):
        return replace(spec, arrivals=replace(spec.arrivals, law=law, rate=rate))
    factor = rate / sum(one.rate or 0.0 for one in spec.classes)
    classes = tuple(replace(one, rate=(one.rate or 0.0) * factor) for one in spec.classes)
    return replace(spec, arrivals=replace(spec.arrivals, law=law), classes=classes)


def has_class_rates(classes: Sequence[ClassSpec]) -> bool:
    return any(one.rate is not None for one in classes)


def check_extent(spec: WorkloadSpec) -> None:
    """Raises BenchError where the spec does not say how many requests there are, or how often they come."""
    given = spec.arrivals
    # a trace alone ends by itself
    has_end = spec.num_requests is not None or (len(spec.classes) == 1 and spec.classes[0].trace is not None)
    if not given.is_open and not has_end:
        raise BenchError("num_requests must be given, as a closed loop has no other end")
    if not given.is_open and spec.duration_s is not None:
        raise BenchError(f"duration needs an open loop (arrivals.law {POISSON}, {GAMMA}, {CONSTANT} or {TRACE})")
    if given.law in (CLOSED, TRACE):
        return
    if (given.rate is not None) + bool(given.ramp) + has_class_rates(spec.classes) != 1:
        raise BenchError(f"arrivals.law {given.law} needs one of arrivals.rate, arrivals.ramp, or a rate of each class")
    if not has_end and spec.duration_s is None and not given.ramp:
        raise BenchError("num_requests or duration must be given, so that the workload has an end")


def _times(given: Arrivals, spec: WorkloadSpec, seed: int) -> list[float]:
    """As many as there are to be, or as come in time."""
    if given.ramp:
        unit = _unit_process(given, seed, spec.num_requests, num_expected(given.ramp))
        return ramp_times(unit, given.ramp)
    assert given.rate is not None
    area = math.inf if spec.duration_s is None else spec.duration_s * given.rate
    return [time / given.rate for time in _unit_process(given, seed, spec.num_requests, area)]


def _unit_process(given: Arrivals, seed: int, num: int | None, end_s: float) -> list[float]:
    """`num` arrivals at one a second; or fewer where they come after end_s; or all until then where num is None."""
    num_drawn = MAX_REQUESTS if num is None else num
    if end_s < math.inf:
        num_drawn = min(num_drawn, math.ceil(1.2 * end_s) + 20)
    while True:
        if num_drawn > MAX_REQUESTS:
            raise BenchError(f"the workload has more than {MAX_REQUESTS:,} requests; give fewer, or a lower rate")
        if given.law == CONSTANT:
            times = arrivals.constant_rate(num_drawn, 1.0)
        else:
            times = arrivals.gamma(num_drawn, 1.0, given.burstiness if given.law == GAMMA else 1.0, seed)
        if num_drawn == num or times[-1] >= end_s:
            return [time for time in times if time < end_s]
        # what has been drawn stays the same when more is
        num_drawn = 2 * num_drawn if num is None else min(num, 2 * num_drawn)


def _times_of_trace(times: Sequence[float], speed: float) -> list[float]:
    return [time / speed for time in times]


def _merged(times: Mapping[int, Sequence[float]]) -> list[Slot]:
    """All classes' arrivals in order of time; among equal ones in that of the classes."""
    streams = [[(time, index) for time in own] for index, own in times.items()]
    return [Slot(index, time) for time, index in islice(heapq.merge(*streams), MAX_REQUESTS)]


def _class_indices(classes: Sequence[ClassSpec], num: int, seed: int) -> list[int]:
    if len(classes) < 2:
        return [0] * num
    weights = [one.share if one.rate is None else one.rate for one in classes]
    shares = [weight / sum(weights) for weight in weights]
    return [int(index) for index in stream(seed, "classes").choice(len(classes), size=num, p=shares)]
