"""The figures a report shows: what each is called, means and is read from, and how it is written.

The one list that tables, CSV, comparisons and definitions are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from noria_bench.distribution import Distribution
from noria_bench.records import Outcome, RequestRecord
from noria_bench.results import Run
from noria_bench.summary import ClassSummary, ServerSummary

NOTHING = "-"
PERCENTILES = {"median": 50.0, "p95": 95.0, "p99": 99.0}
# what a request has of each latency
LATENCIES: dict[str, Callable[[RequestRecord], Iterable[float | None]]] = {
    "ttft": lambda record: [record.ttft_s],
    "tpot": lambda record: [record.tpot_s],
    "icl": lambda record: record.gaps_s,
    "max_gap": lambda record: [record.max_gap_s],
    "e2e": lambda record: [record.e2e_s],
}
Read = Callable[[Run, ClassSummary], float | None]


class Unit(str, Enum):
    """How a figure is shown. It is kept in seconds, and shares as numbers from 0 to 1."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    SHARE = "%"
    COUNT = "count"
    PER_SECOND = "1/s"
    TOKENS_PER_SECOND = "tokens/s"
    NUMBER = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """key: its column in the CSV. better: 1 where more is better, -1 where less is, 0 where neither.

    is_of_server: counted for a whole run, not for a class. latency: of LATENCIES, and statistic: of PERCENTILES, where
    it can be computed from the requests' records.
    """

    key: str
    title: str
    unit: Unit
    better: int
    meaning: str
    read: Read
    is_of_server: bool = False
    latency: str | None = None
    statistic: str | None = None

    def text(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return NOTHING
        if self.unit is Unit.SHARE:
            return f"{100 * value:.1f}%"
        if self.unit is Unit.COUNT and value == round(value):
            return f"{value:,.0f}"
        return number(value * (1000 if self.unit is Unit.MILLISECONDS else 1))


def number(value: float) -> str:
    """Three digits that count, and all of those before the point."""
    if value == 0:
        return "0"
    # as it will be rounded: 9.999 is 10.0
    scientific = f"{value:.2e}"
    exponent = int(scientific.partition("e")[2])
    return scientific if exponent < -6 else f"{value:,.{max(2 - exponent, 0)}f}"


def _latency(name: str, unit: Unit, title: str, meaning: str) -> list[Figure]:
    def read(statistic: str) -> Read:
        def value(run: Run, one: ClassSummary) -> float | None:
            distribution: Distribution | None = getattr(one, f"{name}_s")
            return None if distribution is None else float(getattr(distribution, statistic))

        return value

    return [
        Figure(
            f"{name}_{statistic}_s",
            f"{title}, {statistic}",
            unit,
            -1,
            f"{statistic} of {meaning}",
            read(statistic),
            latency=name,
            statistic=statistic,
        )
        for statistic in PERCENTILES
    ]


def _queue() -> list[Figure]:
    def read(statistic: str) -> Read:
        def value(run: Run, one: ClassSummary) -> float | None:
            server = run.summary.server
            return None if server is None or server.queue_s is None else float(getattr(server.queue_s, statistic))

        return value

    meaning = "the wait from the engine's taking a request to its first step, interpolated in the server's histogram"
    return [
        Figure(
            f"queue_{statistic}_s",
            f"queue, {statistic}",
            Unit.SECONDS,
            -1,
            f"{statistic} of {meaning}",
            read(statistic),
            is_of_server=True,
        )
        for statistic in PERCENTILES
    ]


def _server(name: str, title: str, unit: Unit, better: int, meaning: str) -> Figure:
    def read(run: Run, one: ClassSummary) -> float | None:
        server: ServerSummary | None = run.summary.server
        value = None if server is None else getattr(server, name)
        return None if value is None else float(value)

    return Figure(name, title, unit, better, meaning, read, is_of_server=True)


def _of_class(name: str, title: str, unit: Unit, better: int, meaning: str) -> Figure:
    def read(run: Run, one: ClassSummary) -> float | None:
        value = getattr(one, name)
        return None if value is None else float(value)

    return Figure(name, title, unit, better, meaning, read)


def _outcome(outcome: Outcome, better: int, meaning: str) -> Figure:
    return Figure(
        f"num_{outcome.value}",
        outcome.value,
        Unit.COUNT,
        better,
        meaning,
        lambda run, one: float(one.outcomes.get(outcome.value, 0)),
    )


THROUGHPUT = (
    _of_class(
        "output_tokens_per_s",
        "output tokens/s",
        Unit.TOKENS_PER_SECOND,
        1,
        "useful output: tokens of finished requests over the time from the first send to the last request's end",
    ),
    _of_class(
        "input_tokens_per_s",
        "input tokens/s",
        Unit.TOKENS_PER_SECOND,
        1,
        "prompt tokens of finished requests, likewise",
    ),
    _of_class("requests_per_s", "requests/s", Unit.PER_SECOND, 1, "finished requests, likewise"),
    _of_class(
        "good_requests_per_s",
        "goodput, requests/s",
        Unit.PER_SECOND,
        1,
        "requests that met their class's objectives, likewise",
    ),
    _of_class(
        "good_share",
        "good share",
        Unit.SHARE,
        1,
        "good requests over all but those cancelled on purpose: rejected, late, failed and aborted ones are in the "
        "denominator",
    ),
    _of_class("wall_s", "wall time", Unit.SECONDS, -1, "from the first send to the last request's end"),
)
LATENCY = (
    *_latency("ttft", Unit.SECONDS, "TTFT", "the time from sending to the first piece of the answer"),
    *_latency(
        "tpot", Unit.MILLISECONDS, "TPOT", "each request's (end to end - TTFT) / (output tokens - 1), as vLLM's TPOT"
    ),
    *_latency("icl", Unit.MILLISECONDS, "ICL", "the gaps between pieces, of all requests in one pool"),
    *_latency("max_gap", Unit.MILLISECONDS, "max gap", "each request's longest gap between pieces"),
    *_latency("e2e", Unit.SECONDS, "end to end", "the time from sending to the last piece of the answer"),
)
QUEUE = tuple(_queue())
SERVER = (
    _server(
        "triton_queue_s",
        "Triton's queue, mean",
        Unit.SECONDS,
        -1,
        "the wait in Triton's own queue before the engine has a request: where closed batches wait",
    ),
    _server(
        "slot_utilisation",
        "slot utilisation",
        Unit.SHARE,
        1,
        "slots that held an unfinished sequence over slots offered, summed over steps",
    ),
    _server("mean_batch", "mean batch", Unit.NUMBER, 0, "rows computed in a step, padding rows included"),
    _server(
        "kv_waste", "KV waste", Unit.SHARE, -1, "allocated token slots that hold no token of an unfinished sequence"
    ),
    _server("kv_usage_mean", "KV usage, mean", Unit.SHARE, 0, "blocks held over blocks there are, as sampled"),
    _server("kv_usage_max", "KV usage, max", Unit.SHARE, 0, "the highest sample of it"),
    _server("num_steps", "steps", Unit.COUNT, 0, "iterations of the engine"),
    _server("num_preemptions", "preemptions", Unit.COUNT, -1, "sequences put back to waiting for want of blocks"),
    _server("num_recomputed_tokens", "recomputed tokens", Unit.COUNT, -1, "computed before a preemption, and again"),
    _server("prefix_hit_rate", "prefix hits", Unit.SHARE, 1, "tokens found in the prefix cache over those looked up"),
)
COUNTS = (
    _of_class("num_requests", "requests", Unit.COUNT, 0, "sent, those cancelled on purpose included"),
    _outcome(Outcome.FINISHED, 0, "ended with their whole answer"),
    _outcome(Outcome.CANCELLED, 0, "by the client, as the workload asked"),
    _outcome(Outcome.REJECTED, -1, "the server's queue was full"),
    _outcome(Outcome.EXPIRED, -1, "their deadline passed"),
    _outcome(Outcome.FAILED, -1, "any other error"),
    _outcome(Outcome.ABORTED, -1, "the measurement ended before they did"),
)
GENERATOR = (
    Figure(
        "lateness_p99_s",
        "lateness, p99",
        Unit.MILLISECONDS,
        -1,
        "of sends behind their due time; none in a closed loop",
        lambda run, one: run.generator.lateness_p99_s,
        is_of_server=True,
    ),
    Figure(
        "lateness_max_s",
        "lateness, max",
        Unit.MILLISECONDS,
        -1,
        "the latest send",
        lambda run, one: run.generator.lateness_max_s,
        is_of_server=True,
    ),
    Figure(
        "loop_lag_p99_s",
        "loop lag, p99",
        Unit.MILLISECONDS,
        -1,
        "of the load generator's event loop behind its own timer",
        lambda run, one: run.generator.loop_lag_p99_s,
        is_of_server=True,
    ),
    Figure(
        "generator_cpu_share",
        "generator's CPU",
        Unit.SHARE,
        -1,
        "of one core that the load generator took",
        lambda run, one: run.generator.cpu_share,
        is_of_server=True,
    ),
)
ALL = (*THROUGHPUT, *LATENCY, *QUEUE, *SERVER, *COUNTS, *GENERATOR)
BY_KEY = {figure.key: figure for figure in ALL}
