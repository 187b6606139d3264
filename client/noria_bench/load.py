"""Sends a workload to a server and writes down when each piece of each answer came.

Knows nothing of what the numbers mean: `report` sums them up. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from noria_bench.records import Chunk, RequestRecord
from noria_bench.workload import WorkItem, Workload
from noria_client.client import AsyncClient
from noria_client.errors import ServerError

CANCELLED = "cancelled by the client"


@dataclass
class LoadRun:
    """A measurement as it grows, for a display to watch and for its caller to keep when it is interrupted.

    Only `run_load` writes to it.
    """

    num_requests: int
    records: list[RequestRecord] = field(default_factory=list)
    num_sent: int = 0
    num_tokens: int = 0

    @property
    def num_running(self) -> int:
        return self.num_sent - len(self.records)

    @property
    def num_errors(self) -> int:
        return sum(record.error is not None for record in self.records)


async def run_load(client: AsyncClient, workload: Workload, run: LoadRun, concurrency: int | None = None) -> None:
    """Sends all items at once, or in a closed loop with `concurrency` of them under way.

    A request that fails becomes a record with its error. If this task is cancelled, so are the requests, on the server
    too; what they had so far is in `run.records`.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    pending = iter(enumerate(workload.items))
    num_workers = min(concurrency or len(workload.items), len(workload.items))
    workers = [asyncio.create_task(_work(client, workload, pending, run)) for _ in range(num_workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(client: AsyncClient, workload: Workload, pending: Iterator[tuple[int, WorkItem]], run: LoadRun) -> None:
    for index, item in pending:
        await _send(client, workload, index, item, run)


async def _send(client: AsyncClient, workload: Workload, index: int, item: WorkItem, run: LoadRun) -> None:
    chunks: list[Chunk] = []
    num_input_tokens = 0
    # stays unless the answer comes to its end or the server says something else
    error: str | None = CANCELLED
    run.num_sent += 1
    sent_s = time.monotonic()
    stream = client.stream(item.prompt, max_tokens=item.max_tokens, **workload.sampling)
    try:
        async with aclosing(stream):
            async for delta in stream:
                chunks.append(Chunk(time.monotonic(), delta.num_output_tokens))
                num_input_tokens = delta.num_input_tokens
                run.num_tokens += delta.num_output_tokens
        error = None
    except ServerError as failure:
        error = str(failure)
    finally:
        run.records.append(RequestRecord(index, sent_s, time.monotonic(), num_input_tokens, tuple(chunks), error))
