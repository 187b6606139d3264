"""The load generator as a process of its own: `python -m noria_bench.generator JOB RECORDS`, started by
`generator_process`.

Whoever starts servers, scrapes metrics and draws progress would otherwise share its interpreter with the clock that the
measurement hangs on. Reads the job from a file, writes each request's record to another as its outcome is known, and
tells on standard output, a JSON object a line, how it comes along; the last line holds its health. SIGINT and SIGTERM
cancel the requests on the server and keep what was measured; so does the end of whoever listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from noria_bench.generator_health import LoopMonitor
from noria_bench.load import LoadRun, run_load
from noria_bench.records import Outcome, RequestRecord
from noria_bench.workload import RequestClass, WorkItem, Workload
from noria_client.client import AsyncClient

PROGRESS_S = 0.25
RECENT = 50
# as `nice` counts
PRIORITY = -10


@dataclass(frozen=True)
class Job:
    """url: host:port for the protocol. The rest as `load.run_load` takes it."""

    url: str
    protocol: str
    model: str
    workload: Workload
    concurrency: int | None
    timeout_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        workload = values["workload"]
        return cls(
            **dict(values)
            | {
                "workload": Workload(
                    items=tuple(WorkItem(**item) for item in workload["items"]),
                    sampling=workload["sampling"],
                    classes=tuple(RequestClass(**one) for one in workload["classes"]),
                )
            }
        )


@dataclass(frozen=True)
class Progress:
    """ttft_p95_s: of the last 50 requests that had a first token."""

    num_requests: int
    num_sent: int
    num_ended: int
    num_errors: int
    num_tokens: int
    ttft_p95_s: float | None

    @property
    def num_open(self) -> int:
        return self.num_sent - self.num_ended


async def generate(job: Job, records_file: IO[str], out: IO[str]) -> None:
    """Runs the load to its end, or until this task is cancelled; both end with the line that holds the health."""

    def write(record: RequestRecord) -> None:
        print(json.dumps(record.to_json(), separators=(",", ":")), file=records_file, flush=True)

    run = LoadRun(len(job.workload.items), on_record=write)
    async with AsyncClient(job.url, job.protocol, job.model) as client:
        # connects, and learns the tensors' shapes, outside of what is measured
        await client.traits()
        monitor = LoopMonitor()
        load = asyncio.create_task(run_load(client, job.workload, run, job.concurrency, job.timeout_s))
        helpers = [asyncio.create_task(monitor.watch()), asyncio.create_task(_tell(run, out, load.cancel))]
        try:
            await load
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            is_complete = len(run.records) == run.num_requests and not any(
                record.outcome is Outcome.ABORTED for record in run.records
            )
            with contextlib.suppress(BrokenPipeError):
                _print(out, {"progress": asdict(_progress(run))})
                _print(out, {"health": asdict(monitor.health(run.records)), "is_complete": is_complete})


async def _tell(run: LoadRun, out: IO[str], give_up: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        try:
            _print(out, {"progress": asdict(_progress(run))})
        except BrokenPipeError:
            # whoever asked for the measurement has gone: a load that nobody stops would go on for its whole length
            give_up()
            return


def _progress(run: LoadRun) -> Progress:
    recent = [record.ttft_s for record in run.records[-RECENT:] if record.ttft_s is not None]
    ttft_p95_s = float(np.percentile(recent, 95)) if recent else None
    return Progress(run.num_requests, run.num_sent, len(run.records), run.num_errors, run.num_tokens, ttft_p95_s)


def _print(out: IO[str], line: Mapping[str, Any]) -> None:
    print(json.dumps(line), file=out, flush=True)


async def _main(job: Job, records_path: Path) -> int:
    task = asyncio.create_task(_generate_to_file(job, records_path))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 130
    return 0


async def _generate_to_file(job: Job, records_path: Path) -> None:
    with records_path.open("w", encoding="utf-8") as file:
        await generate(job, file, sys.stdout)


if __name__ == "__main__":
    parsed = Job.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    # a collection of the workload's objects would delay what arrives meanwhile
    gc.freeze()
    # on cores that a server shares, a time stamp must not wait for its threads; where that may not be asked for, the
    # health says how late they were
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    sys.exit(asyncio.run(_main(parsed, Path(sys.argv[2]))))
