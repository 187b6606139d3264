"""One run: a workload sent to a running server once, and everything that is known of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

from noria_bench.environment import busy_cores
from noria_bench.generator import Job, Progress
from noria_bench.generator_process import Generated, StopLoad, run_generator
from noria_bench.progress import RunDisplay
from noria_bench.reconciliation import mismatches
from noria_bench.records import RequestRecord
from noria_bench.results import Run, SeriesPoint
from noria_bench.series import SeriesRecorder
from noria_bench.server_facts import server_facts
from noria_bench.server_metrics import Exposition, scrape_settled
from noria_bench.slo import Objectives
from noria_bench.summary import ServerSummary, Summary, summarise_requests, summarise_server
from noria_bench.workload import Workload
from noria_client.client import DEFAULT_MODEL, Client
from noria_client.errors import ServerError

QUEUE_TIME = "noria_queue_time_seconds"
TRITON_QUEUE, TRITON_REQUESTS = "nv_inference_queue_duration_us", "nv_inference_request_success"
WARM_UP_PROMPT = "Tell me what a water wheel is, and when it was first built."
WARM_UP_TOKENS = 8
UNSETTLED = "nothing that can be told: the server's counters had not come to rest when they were read"
# longer than any step; there is no heartbeat within one
MAX_HEARTBEAT_AGE_S = 120.0


@dataclass(frozen=True)
class ServerUrls:
    """host:port of each of a server's endpoints."""

    grpc: str
    http: str
    metrics: str

    def of(self, protocol: str) -> str:
        return self.http if protocol == "http" else self.grpc


@dataclass(frozen=True)
class RunPlan:
    """What is sent, and how. objectives: by request class. The rest as in `results.Run` and `load.run_load`."""

    name: str
    label: str
    workload: Workload
    seed: int = 0
    repeat: int = 0
    rate: float | None = None
    concurrency: int | None = None
    timeout_s: float | None = None
    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    protocol: str = "grpc"
    model: str = DEFAULT_MODEL
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredRun:
    run: Run
    records: list[RequestRecord]
    series: list[SeriesPoint]


def measure(urls: ServerUrls, plan: RunPlan, console: Console) -> MeasuredRun:
    """Warms the server up, sends the workload from a process of its own, and reads the server's metrics meanwhile.

    Ctrl-C gives the run of what there is. Raises ServerError if the warm-up fails, BenchError if the generator does.
    """
    _warm_up(urls, plan)
    facts = server_facts(urls.http, plan.model)
    before = _scrape(urls, plan.model, console)
    # the server is idle and the generator not there yet: whatever computes now is somebody else
    num_busy_before = busy_cores()
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    recorder = SeriesRecorder(urls.metrics, plan.model)
    workload = _with_salt(plan.workload, f"{plan.name} {started_at}") if _is_noria(before) else plan.workload
    with RunDisplay(plan.name, console) as display, recorder:

        def show(progress: Progress) -> None:
            display.show(progress, recorder.last)
            if recorder.heartbeat_age_s > MAX_HEARTBEAT_AGE_S:
                raise StopLoad(f"the engine has not turned for {recorder.heartbeat_age_s:.0f} s: it hangs, or is dead")

        job = Job(urls.of(plan.protocol), plan.protocol, plan.model, workload, plan.concurrency, plan.timeout_s)
        generated = run_generator(job, show)
    environment = {"busy_cores_before": num_busy_before} | facts
    after: Exposition | None = None
    try:
        after = _scrape(urls, plan.model, console)
        environment["busy_cores_after"] = busy_cores()
    except KeyboardInterrupt:
        # what was measured is kept
        generated = replace(generated, is_interrupted=True)
    return MeasuredRun(
        _run(plan, started_at, generated, before, after, _during(recorder.points, generated.records), environment),
        generated.records,
        recorder.points,
    )


def _with_salt(workload: Workload, salt: str) -> Workload:
    """No run finds in the prefix cache what another has left there. Within the run, prefixes are shared as ever."""
    return replace(workload, sampling={"cache_salt": salt, **workload.sampling})


def _is_noria(exposition: Exposition | None) -> bool:
    return exposition is not None and exposition.has("noria_steps_total")


def _during(series: list[SeriesPoint], records: list[RequestRecord]) -> list[SeriesPoint]:
    """Without the time in which the generator started."""
    if not records:
        return series
    begin_s, end_s = min(record.sent_s for record in records), max(record.ended_s for record in records)
    return [point for point in series if begin_s <= point.time_s <= end_s]


def _warm_up(urls: ServerUrls, plan: RunPlan) -> None:
    """So that what is mapped or cached on first use is so. The prompt shares no prefix with the workload."""
    with Client(urls.of(plan.protocol), plan.protocol, plan.model) as client:
        for _ in client.stream(WARM_UP_PROMPT, max_tokens=WARM_UP_TOKENS, **plan.workload.sampling):
            pass


def _scrape(urls: ServerUrls, model: str, console: Console) -> Exposition | None:
    """Once the engine is idle. A server without metrics can still be measured from outside."""
    try:
        return scrape_settled(urls.metrics, model)
    except ServerError as error:
        console.print(f"no server metrics: {error}", highlight=False, markup=False)
        return None


def _run(
    plan: RunPlan,
    started_at: str,
    generated: Generated,
    before: Exposition | None,
    after: Exposition | None,
    series: list[SeriesPoint],
    environment: Mapping[str, Any],
) -> Run:
    summed, classes = summarise_requests(generated.records, plan.objectives)
    server: ServerSummary | None = None
    found: tuple[str, ...] = ()
    if before is not None and after is not None and _is_noria(after):
        server, found = _server_side(generated.records, before, after, series)
    return Run(
        name=plan.name,
        label=plan.label,
        repeat=plan.repeat,
        seed=plan.seed,
        rate=plan.rate,
        concurrency=plan.concurrency,
        started_at=started_at,
        summary=Summary(summed, classes, server),
        generator=generated.health,
        engine=plan.engine,
        environment=environment,
        workload_sha256=plan.workload.digest(),
        mismatches=found,
        is_interrupted=generated.is_interrupted,
    )


def _triton_queue_s(before: Exposition, after: Exposition) -> float | None:
    microseconds, num = (after.value(name) - before.value(name) for name in (TRITON_QUEUE, TRITON_REQUESTS))
    return microseconds / num / 1e6 if num else None


def _server_side(
    records: list[RequestRecord], before: Exposition, after: Exposition, series: list[SeriesPoint]
) -> tuple[ServerSummary | None, tuple[str, ...]]:
    try:
        grown = after.counters() - before.counters()
    except ValueError as error:
        return None, (str(error),)
    queue_s = (after.histogram(QUEUE_TIME) - before.histogram(QUEUE_TIME)).distribution()
    usage = [point.kv_usage for point in series]
    found = mismatches(records, grown) if after.is_settled else (UNSETTLED,)
    server = summarise_server(grown, queue_s, usage, _triton_queue_s(before, after))
    return server, found
