"""The one thread that publishes metrics, so that neither the engine nor the clients wait for it.

The engine's thread leaves its newest counts here and what has ended; four times a second they go to Triton.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace

from noria.engine.outputs import EngineStats, StepReport
from noria.engine.request_timings import RequestTimings
from noria.serving.triton_metrics import TritonMetrics

log = logging.getLogger(__name__)

PERIOD_S = 0.25
# That wait to be observed, which takes 2 ms each: what comes faster is left out of the histograms, oldest first. The
# counters miss nothing.
MAX_ENDED = 4096
# for the observations that are left at the end, when an unload waits for them
LAST_S = 5.0


class MetricsPublisher:
    """stats: the engine's before its first step. `start` publishes them before it returns."""

    def __init__(self, metrics: TritonMetrics, stats: EngineStats) -> None:
        self._metrics = metrics
        self._stats = stats
        self._ended: deque[RequestTimings] = deque(maxlen=MAX_ENDED)
        self._num_invalid = 0
        self._has_failed = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noria-metrics", daemon=True)

    def start(self) -> None:
        self._publish(PERIOD_S)
        self._thread.start()

    def deliver(self, report: StepReport) -> None:
        """On the engine's thread; never blocks."""
        if report.stats is not None:
            self._stats = report.stats
        self._ended.extend(output.timings for output in report.outputs if output.timings is not None)

    def count_invalid(self) -> None:
        """A request that was refused before it reached the engine. On Triton's thread."""
        self._num_invalid += 1

    def stop(self, timeout_s: float) -> bool:
        """Publish what has been delivered, then zeros for gauges. False if that took too long."""
        self._is_stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopping.wait(PERIOD_S):
            self._publish(PERIOD_S)
        self._publish(LAST_S)
        try:
            self._metrics.retire()
        except Exception:
            log.warning("the gauges could not be set to 0", exc_info=True)

    def _publish(self, budget_s: float) -> None:
        """budget_s: for observations; those that are left wait for the next time."""
        deadline = time.monotonic() + budget_s
        try:
            self._metrics.publish(replace(self._stats, num_invalid=self._stats.num_invalid + self._num_invalid))
            while self._ended and time.monotonic() < deadline:
                self._metrics.observe(self._ended.popleft())
            self._has_failed = False
        except Exception:
            # once, not four times a second
            if not self._has_failed:
                log.warning("metrics could not be published", exc_info=True)
            self._has_failed = True
