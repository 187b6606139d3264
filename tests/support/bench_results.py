"""Results of `noria bench` as it would write them, from a small simulation of batches: no server, no clock.

A step takes STEP_S and SLOT_S for each row. Closed batches wait for each other; in flight a slot is refilled at the
next step. Enough for figures that hang together: the same requests in every mode, queues that grow, slots that are
padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.results import (
    Capacity,
    GeneratorHealth,
    Result,
    Run,
    SeriesPoint,
    requests_path,
    series_path,
    write_lines,
    write_result,
)
from noria_bench.slo import Objectives
from noria_bench.summary import Summary, summarise_requests, summarise_server

MODES = ("static", "dynamic", "inflight")
SLOTS = 8
STEP_S, SLOT_S = 0.030, 0.004
SLO = {"chat": Objectives(ttft_s=5.0, tpot_s=0.1), "batch": Objectives(e2e_s=40.0)}
# what a server might be made to say
HOSTILE = (
    """INTERNAL: <script>alert("x")</script> [red]$\\alpha$ | `--` </svg> <img src=http://evil.example/x.png> """
    """& ' onload="alert(2)" \u202e\x07\ud800"""
)


@dataclass(frozen=True)
class Request:
    arrives_s: float
    num_output_tokens: int
    request_class: str


def write_bench_result(
    folder: Path,
    modes: Sequence[str] = MODES,
    rates: Sequence[float | None] = (None,),
    num_repeats: int = 1,
    num_requests: int = 32,
    lengths: Sequence[int] = (20, 50, 100, 500),
    pace: float = 1.0,
    has_failures: bool = False,
    has_capacities: bool = False,
    has_lines: bool = True,
    seed: int = 0,
    sha256: str = "5eed" * 16,
) -> Result:
    """Write a result into `folder`, and return it.

    lengths: outputs are drawn from, in equal parts. pace: multiplies how long a step takes. has_failures: the last of
    each four requests of every run ends in another way. has_lines: write requests and series, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for rate in rates:
        for repeat in range(num_repeats):
            requests = _requests(num_requests, lengths, rate, seed + repeat)
            for mode in modes:
                name = f"{mode}-{repeat}" if rate is None else f"{mode}-rate{rate:g}-{repeat}"
                drift = 1 + 0.02 * np.random.default_rng([seed, repeat, len(runs)]).standard_normal()
                records, series, counters = _served(mode, requests, pace * float(drift))
                if has_failures:
                    records = [_failed(record) if record.index % 4 == 3 else record for record in records]
                if has_lines:
                    write_lines(requests_path(folder, name), (record.to_json() for record in records))
                    write_lines(series_path(folder, name), ({f: getattr(p, f) for f in p.__slots__} for p in series))
                runs.append(_run(name, mode, repeat, seed + repeat, rate, records, series, counters))
    drawn = np.asarray([lengths[index % len(lengths)] for index in range(num_requests)])
    result = Result(
        command=["noria", "bench", "--modes", ",".join(modes)],
        created_at="2025-01-02T03:04:05+00:00",
        arguments={"modes": list(modes), "repeat": num_repeats},
        workload={"source": "synthetic", "sha256": sha256, "output_cv": float(drawn.std() / drawn.mean())},
        slo={"chat": "ttft_p95=5,tpot_p95=0.1", "batch": "e2e_p95=40"},
        environment={
            "cpu": {"model": "Imaginary 2"},
            "num_cores": 2,
            "packages": {"noria": "0.1.0", "torch": "2.13.0", "numpy": "1.26.4"},
            "source": {"revision": "0123456789abcdef", "is_modified": True},
            "model": {"name": "embedded", "dtype": "float32", "files": {"model.safetensors": "feed" * 16}},
        },
        runs=runs,
        capacities=_capacities(modes) if has_capacities else [],
    )
    write_result(folder, result)
    return result


def with_run(result: Result, index: int, **changes: object) -> Result:
    """The result with fields of one run changed."""
    runs = list(result.runs)
    runs[index] = replace(runs[index], **changes)  # type: ignore[arg-type]
    return replace(result, runs=runs)


def health(problems: tuple[str, ...] = ()) -> GeneratorHealth:
    return GeneratorHealth(0.002, 0.011, 0.001, 0.12, problems)


def _requests(num: int, lengths: Sequence[int], rate: float | None, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    outputs = rng.permutation([lengths[index % len(lengths)] for index in range(num)])
    arrivals = np.zeros(num) if rate is None else np.cumsum(rng.exponential(1 / rate, num))
    return [
        Request(float(arrival), int(output), "batch" if output > 80 else "chat")
        for arrival, output in zip(arrivals, outputs, strict=True)
    ]


def _served(
    mode: str, requests: Sequence[Request], pace: float
) -> tuple[list[RequestRecord], list[SeriesPoint], EngineCounters]:
    """All requests, to their end."""
    now, steps, rows, useful = 1000.0, 0, 0, 0
    waiting = list(range(len(requests)))
    slots: list[int] = []
    times: list[list[float]] = [[] for _ in requests]
    series = []
    while waiting or slots:
        arrived = [index for index in waiting if 1000 + requests[index].arrives_s <= now]
        if not slots or mode == "inflight":
            taken = arrived[: SLOTS - len(slots)]
            waiting = [index for index in waiting if index not in taken]
            slots = slots + taken
        if not slots:
            now = 1000 + requests[waiting[0]].arrives_s
            continue
        now += pace * (STEP_S + SLOT_S * len(slots))
        live = [index for index in slots if len(times[index]) < requests[index].num_output_tokens]
        for index in live:
            times[index].append(now)
        steps, rows, useful = steps + 1, rows + len(slots), useful + len(live)
        live = [index for index in live if len(times[index]) < requests[index].num_output_tokens]
        if mode == "inflight" or not live:
            slots = live
        if steps % 10 == 1:
            num_arrived = sum(1000 + requests[index].arrives_s <= now for index in waiting)
            usage = sum(64 + len(times[index]) for index in slots) / 8192
            tokens = sum(map(len, times))
            series.append(SeriesPoint(now, len(slots), num_arrived, usage, tokens, steps * SLOTS, useful))
    records = [
        RequestRecord(
            index,
            1000 + request.arrives_s,
            times[index][-1],
            100,
            tuple(Chunk(time_s, 1) for time_s in times[index]),
            request_class=request.request_class,
            due_s=1000 + request.arrives_s,
        )
        for index, request in enumerate(requests)
    ]
    counters = EngineCounters(
        steps=steps,
        slot_steps=steps * SLOTS,
        useful_slot_steps=useful,
        rows=rows,
        kv_allocated_slot_steps=rows * 64,
        kv_live_slot_steps=useful * 62,
        preemptions=3 if mode == "inflight" else 0,
        recomputed_tokens=240 if mode == "inflight" else 0,
        prefix_tokens=3200,
        prefix_hit_tokens=800,
    )
    return records, series, counters


def _failed(record: RequestRecord) -> RequestRecord:
    """One way or another, by its index."""
    kinds = (
        (Outcome.REJECTED, 0, "UNAVAILABLE: the queue is full"),
        (Outcome.EXPIRED, 0, "DEADLINE_EXCEEDED: waited 30 s"),
        (Outcome.FAILED, 4, HOSTILE),
        (Outcome.CANCELLED, 6, None),
        (Outcome.ABORTED, 8, "the measurement ended"),
    )
    outcome, num_chunks, error = kinds[record.index // 4 % len(kinds)]
    chunks = record.chunks[:num_chunks]
    ended_s = chunks[-1].time_s if chunks else record.sent_s + 0.01
    return replace(record, outcome=outcome, chunks=chunks, error=error, ended_s=ended_s)


def _run(
    name: str,
    mode: str,
    repeat: int,
    seed: int,
    rate: float | None,
    records: Sequence[RequestRecord],
    series: Sequence[SeriesPoint],
    counters: EngineCounters,
) -> Run:
    everything, classes = summarise_requests(records, SLO)
    queue_s = Distribution.of(max(0.0, (record.ttft_s or 0.0) - STEP_S - SLOTS * SLOT_S) for record in records)
    server = summarise_server(counters, queue_s, [point.kv_usage for point in series])
    engine: Mapping[str, object] = {"batching_mode": mode, "max_num_seqs": SLOTS, "dtype": "float32"}
    return Run(
        name=name,
        label=mode,
        repeat=repeat,
        seed=seed,
        rate=rate,
        concurrency=None,
        started_at="2025-01-02T03:04:05+00:00",
        summary=Summary(everything, classes, server),
        generator=health(),
        engine=engine,
        environment={"busy_cores_before": 0.25, "busy_cores_after": 0.25 + 0.5 * repeat},
    )


def _capacities(modes: Sequence[str]) -> list[Capacity]:
    slo = "ttft_p95=5,tpot_p95=0.1"
    found = {
        "static": Capacity("static", slo, None, None, None, True, "ttft_p95", 6),
        "dynamic": Capacity("dynamic", slo, 0.11, 0.09, 0.14, True, "ttft_p95", 6),
        "inflight": Capacity("inflight", slo, 0.42, 0.38, 0.45, False, None, 6),
    }
    return [found[mode] for mode in modes]
