"""What the scheduler itself costs: microseconds per step, without any model.

    python benchmarks/scheduler_cost.py

Every running sequence decodes one token a step, as in-flight batching spends most of its time; no prompt begins like
another, so the prefix cache costs and gives nothing.
"""

from __future__ import annotations

import statistics
import time

from noria.config import EngineConfig
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken
from noria.scheduling.build import build_scheduler
from noria.scheduling.scheduler import Scheduler
from noria.sequence import Request

PROMPT_LEN = 64
NUM_STEPS = 300
# running, waiting, prefix caching
CASES = (
    (16, 0, True),
    (64, 0, True),
    (256, 0, True),
    (1024, 0, True),
    (256, 0, False),
    (256, 100, True),
    (256, 10_000, True),
)
TOKEN = SampledToken(5)


def filled_scheduler(num_running: int, num_waiting: int, prefix_caching: bool = True) -> Scheduler:
    config = EngineConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(512, 2 * num_running),
        max_queue_size=2 * 10**4,
        prefix_caching=prefix_caching,
    )
    scheduler = build_scheduler(config, num_blocks=num_running * 64)
    params = SamplingParams(max_tokens=900, temperature=0.0)
    for index in range(num_running + num_waiting):
        scheduler.add(Request(index, tuple(range(index, index + PROMPT_LEN)), params, seed=0))
    while scheduler.num_running < num_running:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Seconds in `schedule` and `update`, without what stands in for the runner."""
    started = time.perf_counter()
    output = scheduler.schedule(started)
    scheduled = time.perf_counter()
    result = {row.request_id: TOKEN for row in output.rows if row.sampling is not None}
    computed = time.perf_counter()
    scheduler.update(output, result)
    return time.perf_counter() - computed + scheduled - started


def main() -> None:
    print(f"{'running':>8} {'waiting':>8} {'prefix cache':>13} {'median us':>10} {'p99 us':>8} {'us a sequence':>14}")
    schedulers = [filled_scheduler(*case) for case in CASES]
    times: list[list[float]] = [[] for _ in CASES]
    # in turn, so that a busy moment of the machine falls on all
    for _ in range(NUM_STEPS):
        for scheduler, own in zip(schedulers, times, strict=True):
            own.append(1e6 * step(scheduler))
    for (num_running, num_waiting, prefix_caching), own in zip(CASES, times, strict=True):
        median, p99 = statistics.median(own), sorted(own)[int(0.99 * len(own))]
        word = "on" if prefix_caching else "off"
        print(f"{num_running:>8} {num_waiting:>8} {word:>13} {median:>10.0f} {p99:>8.0f} {median / num_running:>14.2f}")


if __name__ == "__main__":
    main()
