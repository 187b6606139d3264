"""One run of one peer, in a process of its own with nothing else of ours beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noria_bench.environment import busy_cores
from peers.installing import python_of, reason, venv_of
from peers.protocol import READY, Task
from peers.registry import CLEARED, PeerSpec, variables

BENCHMARKS = Path(__file__).parent.parent
# long enough that a colleague's burst is seen, short beside a run
LOOK_S = 1.0


def run_peer(spec: PeerSpec, task: Task, venvs: Path, log: Path, timeout_s: float) -> dict[str, Any]:
    """The peer's result, or `error`; with what others took of the cores before and after it, and its variables.

    log: where its standard error goes.
    """
    own = variables(spec, venv_of(spec, venvs), task.num_threads)
    others = {"busy_cores_before": busy_cores(LOOK_S)}
    command = [str(python_of(spec, venvs)), "-m", f"peers.{spec.module}", json.dumps(asdict(task))]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            # where `peers` is found
            cwd=BENCHMARKS,
            env=_environment(own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
        timer = threading.Timer(timeout_s, _end, [process])
        timer.start()
        try:
            output, _ = process.communicate()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            # it may have left workers
            _end(process)
    others["busy_cores_after"] = busy_cores(LOOK_S)
    result = {"error": f"not done within {timeout_s:.0f} s"} if is_late else _result(output, process.returncode, log)
    return {**result, "variables": own, **others}


def _result(output: str, code: int, log: Path) -> dict[str, Any]:
    lines = output.splitlines()
    if code == 0 and len(lines) == 2 and lines[0] == READY:
        found: dict[str, Any] = json.loads(lines[1])
        return found
    return {"error": reason(log.read_text(errors="replace"), f"exit code {code}")}


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
    return {**kept, **own}


def _end(process: subprocess.Popen[str]) -> None:
    """The process and what it started, all of one session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
