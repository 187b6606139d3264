"""Starts the load's process, and counts what it tells. Knows nothing of servers but their address."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from noria_bench.generator_process import generator_environment
from soak.load import MAX_PROBLEMS, Job, Kind

BENCHMARKS = Path(__file__).parent.parent
STOP_S = 10.0
MAX_KEPT_PROBLEMS = 5


@dataclass(frozen=True)
class Counts:
    """Requests that have ended, by what was asked of them; failed are those of any kind that ended otherwise.

    output_tokens: of all of them. reconnects: connections that took the place of another.
    """

    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    reconnects: int = 0
    output_tokens: int = 0


_FIELDS = {Kind.ORDINARY: "finished", Kind.CANCELLED: "cancelled", Kind.INVALID: "refused"}


class RunningLoad:
    """A load of our own, within a `with` block, at whose end it is no more.

    counts: so far. problems: the first few that it told of, and that it failed as a whole.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reader = threading.Thread(target=self._read, name="soak-load", daemon=True)
        self._is_stopped = False
        self.counts = Counts()
        self.problems: list[str] = []

    def __enter__(self) -> RunningLoad:
        # a session of its own: a Ctrl-C is for us, who end it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soak.load", json.dumps(asdict(self._job))],
            # where `soak` is found
            cwd=BENCHMARKS,
            env=generator_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._is_stopped = True
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def wait(self, seconds: float) -> bool:
        """Until it has ended, or so long; whether it has."""
        self._reader.join(max(0.0, seconds))
        return not self._reader.is_alive()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._count(json.loads(line))
        if self._process.wait() != 0 and not self._is_stopped:
            self.problems.append(f"the load ended with code {self._process.returncode}")
        if self.counts.failed >= MAX_PROBLEMS:
            self.problems.append(
                f"the load gave up, after {self.counts.failed} requests that did not end as they should"
            )

    def _count(self, ended: Mapping[str, Any]) -> None:
        counts, problem = asdict(self.counts), ended["problem"]
        counts["failed" if problem else _FIELDS[Kind(ended["kind"])]] += 1
        counts["reconnects"] += bool(ended["has_reconnected"])
        counts["output_tokens"] += ended["num_tokens"]
        self.counts = Counts(**counts)
        if problem and len(self.problems) < MAX_KEPT_PROBLEMS:
            self.problems.append(str(problem))
