"""Starts the load generator, follows it, and takes in what it wrote. Knows nothing of servers but their address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noria_bench.errors import BenchError
from noria_bench.generator import Job, Progress
from noria_bench.records import RequestRecord
from noria_bench.results import GeneratorHealth

STOP_S = 20.0
# gRPC's own threads hand each message to another; without them a response costs the generator 0.17 ms in place of 0.25
_GRPC_EXPERIMENTS = "-event_engine_client"


def generator_environment() -> dict[str, str]:
    """Variables for a process that sends load. If the user has chosen experiments of gRPC, those stay."""
    return {"GRPC_EXPERIMENTS": _GRPC_EXPERIMENTS} | os.environ


class StopLoad(Exception):
    """To be raised by whoever follows the progress: the load is of no use any more. The message says why."""


@dataclass(frozen=True)
class Generated:
    """records: in the workload's order. is_interrupted: by Ctrl-C."""

    records: list[RequestRecord]
    health: GeneratorHealth
    is_interrupted: bool


def run_generator(job: Job, on_progress: Callable[[Progress], None]) -> Generated:
    """Runs the job to its end. Ctrl-C ends it early and keeps what was measured.

    Raises BenchError when the generator could not do its work at all, such as without a server.
    """
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as name:
        folder = Path(name)
        job_path, records_path, errors = (folder / name for name in ("job.json", "records.jsonl", "errors.log"))
        job_path.write_text(json.dumps(job.to_json()), encoding="utf-8")
        with errors.open("w") as errors_file:
            # a session of its own: a Ctrl-C is for the starter, who passes it on once
            process = subprocess.Popen(
                [sys.executable, "-m", "noria_bench.generator", str(job_path), str(records_path)],
                env=generator_environment(),
                stdout=subprocess.PIPE,
                stderr=errors_file,
                text=True,
                start_new_session=True,
            )
        last, is_interrupted, stopped = _follow(process, on_progress)
        records = _read(records_path)
        if not is_interrupted and process.returncode != 0 and not records:
            raise BenchError(f"the load generator failed: {_last_line(errors)}")
        health = _health(last)
        if stopped:
            health = replace(health, problems=(*health.problems, stopped))
        elif not is_interrupted and (process.returncode != 0 or not last.get("is_complete", False)):
            reason = f"the load generator ended early, with code {process.returncode}: {_last_line(errors)}"
            health = replace(health, problems=(*health.problems, reason))
        return Generated(records, health, is_interrupted)


def _health(last: Mapping[str, Any]) -> GeneratorHealth:
    if "health" not in last:
        return GeneratorHealth(None, None, 0.0, 0.0)
    return GeneratorHealth(**last["health"] | {"problems": tuple(last["health"]["problems"])})


def _follow(
    process: subprocess.Popen[str], on_progress: Callable[[Progress], None]
) -> tuple[dict[str, Any], bool, str]:
    """The last line that the generator told, whether it was interrupted, and why it was stopped, if it was. The process
    has ended then."""
    last: dict[str, Any] = {}
    is_interrupted, stopped = False, ""
    assert process.stdout is not None
    try:
        while True:
            try:
                line = process.stdout.readline()
                if not line:
                    process.wait(STOP_S)
                    return last, is_interrupted, stopped
                last = json.loads(line)
                if "progress" in last:
                    on_progress(Progress(**last["progress"]))
            except StopLoad as reason:
                if not stopped:
                    process.send_signal(signal.SIGINT)
                stopped = str(reason)
            except KeyboardInterrupt:
                # once it keeps what was measured; twice somebody does not want to wait for that
                process.send_signal(signal.SIGKILL if is_interrupted else signal.SIGINT)
                is_interrupted = True
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _read(path: Path) -> list[RequestRecord]:
    """A generator that was killed may have left half a line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = [RequestRecord.from_json(json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(records, key=lambda record: record.index)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
