"""What is read of a server at a moment, and how what it holds grows with the requests that it has finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from noria_bench.server_metrics import scrape
from noria_client.client import DEFAULT_MODEL
from soak.processes import ProcessUse, process_use, shm_mib, stub_of
from soak.running import Counts

# of the time, before which the server still warms up
WARM_UP_SHARE = 0.25
MIN_POINTS = 3
# of so few requests that ended, allocators that warm up would look like a leak
MIN_FINISHED = 100


@dataclass(frozen=True)
class Sample:
    """time_s: since the load began. shm_mib: see `processes`. num_used_blocks: of the KV cache, that sequences hold;
    num_cached_blocks: that nobody holds, kept for the prefixes in them."""

    time_s: float
    server: ProcessUse
    stub: ProcessUse
    shm_mib: float
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    counts: Counts


# what should not grow, however many requests were served
HELD: dict[str, Callable[[Sample], float | None]] = {
    "tritonserver RSS, MiB": lambda sample: sample.server.rss_mib,
    "tritonserver PSS, MiB": lambda sample: sample.server.pss_mib,
    "tritonserver files": lambda sample: sample.server.num_fds,
    "tritonserver threads": lambda sample: sample.server.num_threads,
    "stub RSS, MiB": lambda sample: sample.stub.rss_mib,
    "stub PSS, MiB": lambda sample: sample.stub.pss_mib,
    "stub files": lambda sample: sample.stub.num_fds,
    "stub threads": lambda sample: sample.stub.num_threads,
    "/dev/shm, MiB": lambda sample: sample.shm_mib,
}
BLOCKS: dict[str, Callable[[Sample], float | None]] = {
    "KV blocks used": lambda sample: sample.num_used_blocks,
    "KV blocks cached": lambda sample: sample.num_cached_blocks,
    "KV blocks free": lambda sample: sample.num_free_blocks,
}


class Sampler:
    """Of one server and its stub, by their process ids. metrics_url: host:port of Triton's metrics endpoint."""

    def __init__(self, server_pid: int, metrics_url: str) -> None:
        """Raises EngineFailure if the server has no stub."""
        self._server_pid, self._stub_pid = server_pid, stub_of(server_pid)
        self._metrics_url = metrics_url

    def sample(self, time_s: float, counts: Counts) -> Sample:
        """Raises EngineFailure if one of the two has ended, ServerError if the metrics cannot be read."""
        server = process_use(self._server_pid, "tritonserver")
        stub = process_use(self._stub_pid, "the model's process")
        now = scrape(self._metrics_url, DEFAULT_MODEL)
        num_used, num_cached = now.value("noria_kv_blocks_held"), now.value("noria_kv_blocks_cached")
        return Sample(
            time_s=round(time_s, 3),
            server=server,
            stub=stub,
            shm_mib=shm_mib((self._server_pid, self._stub_pid)),
            num_running=int(now.value("noria_num_requests_running")),
            # in the engine's queue, and in Triton's before it
            num_waiting=int(now.value("noria_num_requests_waiting") + now.value("nv_inference_pending_request_count")),
            num_used_blocks=int(num_used),
            num_cached_blocks=int(num_cached),
            num_free_blocks=int(now.value("noria_kv_blocks") - num_used - num_cached),
            counts=counts,
        )


@dataclass(frozen=True)
class Growth:
    """Least squares, per 1,000 finished requests. standard_error: if the deviations from the line are independent."""

    per_1000: float
    standard_error: float


def growth(samples: Sequence[Sample], measure: Callable[[Sample], float | None]) -> Growth | None:
    """Of what was measured while the load ran, without the first quarter of its time. None where it was not measured,
    or at fewer than three moments, or fewer than MIN_FINISHED requests were finished between them."""
    if not samples:
        return None
    begin_s = WARM_UP_SHARE * samples[-1].time_s
    points = [(sample.counts.finished, measure(sample)) for sample in samples if sample.time_s >= begin_s]
    if points[-1][0] - points[0][0] < MIN_FINISHED:
        return None
    return slope([(num, value) for num, value in points if value is not None])


def slope(points: Sequence[tuple[float, float]]) -> Growth | None:
    if len(points) < MIN_POINTS:
        return None
    x, y = np.asarray(points, dtype=float).T
    x, y = x - x.mean(), y - y.mean()
    squares = float(x @ x)
    if squares == 0:
        return None
    per_one = float(x @ y) / squares
    residuals = y - per_one * x
    error = float(np.sqrt(residuals @ residuals / (len(points) - 2) / squares))
    return Growth(1000 * per_one, 1000 * error)


def left_over(idle: Sample) -> list[str]:
    """What a server at rest should not have."""
    held = {
        "running requests": idle.num_running,
        "waiting requests": idle.num_waiting,
        "KV blocks that are held": idle.num_used_blocks,
    }
    return [f"{num} {name} at rest, after all requests had ended" for name, num in held.items() if num]
