"""Whether a load generator kept up with its own plan: if it did not, the run measured the generator, not the server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import numpy as np

from noria_bench.records import RequestRecord
from noria_bench.results import GeneratorHealth

# Beyond these a run is not valid. A latency of a second is then wrong by a twentieth at most.
MAX_LATENESS_S = 0.05
MAX_LOOP_LAG_S = 0.05
MAX_CPU_SHARE = 0.8
PROBE_S = 0.02
MIN_WALL_S = 1.0


class LoopMonitor:
    """Asks to be woken every 20 ms, and notes how late that happens: so late are time stamps and sends, too."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._started_s = time.monotonic()
        self._started_cpu_s = time.process_time()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            asked_s = time.monotonic()
            try:
                await asyncio.sleep(PROBE_S)
            finally:
                self._note(time.monotonic() - asked_s - PROBE_S)

    def _note(self, lag_s: float) -> None:
        """A long stall delays whatever falls into it, each thing by what is left of it, and counts accordingly."""
        self._lags_s.append(max(0.0, lag_s))
        while lag_s > PROBE_S:
            lag_s -= PROBE_S
            self._lags_s.append(lag_s)

    def health(self, records: Sequence[RequestRecord]) -> GeneratorHealth:
        """Of the time since this was made. records: of the requests that were sent meanwhile."""
        wall_s = time.monotonic() - self._started_s
        cpu_s = time.process_time() - self._started_cpu_s
        # of a moment's work it says nothing
        cpu_share = cpu_s / max(wall_s, MIN_WALL_S)
        lag_s = _percentile(self._lags_s, 99) or 0.0
        lateness_s = [record.lateness_s for record in records if record.lateness_s is not None]
        late_p99_s, late_max_s = _percentile(lateness_s, 99), _percentile(lateness_s, 100)
        problems = tuple(_problems(late_p99_s, lag_s, cpu_share))
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return GeneratorHealth(late_p99_s, late_max_s, lag_s, cpu_share, problems, niceness)


def _problems(lateness_s: float | None, lag_s: float, cpu_share: float) -> list[str]:
    found = []
    if lateness_s is not None and lateness_s > MAX_LATENESS_S:
        found.append(f"1 % of the requests were sent more than {lateness_s:.3f} s late (at most {MAX_LATENESS_S} s)")
    if lag_s > MAX_LOOP_LAG_S:
        found.append(f"1 % of its time stamps may be more than {lag_s:.3f} s late (at most {MAX_LOOP_LAG_S} s)")
    if cpu_share > MAX_CPU_SHARE:
        found.append(f"it took {cpu_share:.0%} of a core (at most {MAX_CPU_SHARE:.0%})")
    return [f"the load generator did not keep up: {what}" for what in found]


def _percentile(values: Sequence[float], percentile: float) -> float | None:
    return float(np.percentile(values, percentile)) if values else None
