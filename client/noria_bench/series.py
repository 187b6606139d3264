"""The server's gauges as time goes by: how long the queue was and how full the cache, at each moment of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType

from noria_bench.results import SeriesPoint
from noria_bench.server_metrics import HEARTBEAT, Exposition, scrape
from noria_client.errors import ServerError


class SeriesRecorder:
    """Scrapes on a thread of its own, within a `with` block. A scrape that fails leaves a gap.

    last: the newest point, for a display; None until there is one.
    """

    def __init__(self, metrics_url: str, model: str, interval_s: float = 0.5) -> None:
        self._metrics_url = metrics_url
        self._model = model
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noria-series", daemon=True)
        self.points: list[SeriesPoint] = []
        # of the engine, Unix time as the server tells it; 0 where it does not
        self.heartbeat_at = 0.0

    @property
    def heartbeat_age_s(self) -> float:
        """How long ago the engine last turned; 0 where nobody knows."""
        return max(0.0, time.time() - self.heartbeat_at) if self.heartbeat_at else 0.0

    @property
    def last(self) -> SeriesPoint | None:
        return self.points[-1] if self.points else None

    def __enter__(self) -> SeriesRecorder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(ServerError):
                now = scrape(self._metrics_url, self._model)
                self.heartbeat_at = now.value(HEARTBEAT)
                self.points.append(series_point(now, time.monotonic()))
            self._is_over.wait(self._interval_s)


def series_point(now: Exposition, time_s: float) -> SeriesPoint:
    num_blocks = now.value("noria_kv_blocks")
    return SeriesPoint(
        time_s=time_s,
        num_running=now.value("noria_num_requests_running"),
        # in the engine's queue, and in Triton's before it, where those of the closed modes are
        num_waiting=now.value("noria_num_requests_waiting") + now.value("nv_inference_pending_request_count"),
        kv_usage=now.value("noria_kv_blocks_held") / num_blocks if num_blocks else 0.0,
        generation_tokens=now.value("noria_generation_tokens_total"),
        slot_steps=now.value("noria_slot_steps_total"),
        useful_slot_steps=now.value("noria_useful_slot_steps_total"),
    )
