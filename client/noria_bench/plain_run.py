"""A run that no load generator made: a simulation's, or that of an engine in the same process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.records import RequestRecord
from noria_bench.results import GeneratorHealth, Run
from noria_bench.slo import Objectives
from noria_bench.summary import Summary, summarise_requests, summarise_server

# nothing was sent, so nothing was late
NO_GENERATOR = GeneratorHealth(lateness_p99_s=None, lateness_max_s=None, loop_lag_p99_s=0.0, cpu_share=0.0)


def plain_run(
    label: str,
    records: Sequence[RequestRecord],
    counters: EngineCounters | None = None,
    queue_s: Distribution | None = None,
    objectives: Mapping[str, Objectives] | None = None,
) -> Run:
    """counters: how much the engine's grew during the run. queue_s: times from arrival to the first step."""
    summed, classes = summarise_requests(records, objectives or {})
    server = None if counters is None else summarise_server(counters, queue_s)
    return Run(
        name=label,
        label=label,
        repeat=0,
        seed=0,
        rate=None,
        concurrency=None,
        started_at="",
        summary=Summary(summed, classes, server),
        generator=NO_GENERATOR,
    )
