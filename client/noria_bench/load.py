"""Sends a workload to a server and writes down when each piece of each answer came.

Knows nothing of what the numbers mean: `summary` sums them up. Times are seconds of the system's monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from noria_bench.outcomes import outcome_of
from noria_bench.records import Chunk, Outcome, RequestRecord
from noria_bench.workload import WorkItem, Workload
from noria_client.client import AsyncClient
from noria_client.errors import ServerError

# to make the task of one request
MAKING_S = 1e-5
ABORTED = "the measurement ended before the request did"


@dataclass
class LoadRun:
    """A measurement as it grows, for a display to watch and for its caller to keep when it is interrupted.

    Only `run_load` writes to it. on_record: called with each request's record when its outcome is known.
    """

    num_requests: int
    records: list[RequestRecord] = field(default_factory=list)
    num_sent: int = 0
    num_tokens: int = 0
    on_record: Callable[[RequestRecord], None] | None = None

    @property
    def num_running(self) -> int:
        return self.num_sent - len(self.records)

    @property
    def num_errors(self) -> int:
        return sum(record.error is not None for record in self.records)

    def add(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)


async def run_load(
    client: AsyncClient,
    workload: Workload,
    run: LoadRun,
    concurrency: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Sends each item when it is due, whatever has become of the others (an open loop); items without a due time all at
    once, or in a closed loop with `concurrency` of them under way.

    timeout_s: after which the server is to end a request. Whatever becomes of a request, it becomes a record. If this
    task is cancelled, so are the requests, on the server too; what they had so far is in `run.records`.
    Raises ValueError for a concurrency below 1, and for one beside due times: it would hold back what is due.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    if concurrency is not None and any(item.due_s is not None for item in workload.items):
        raise ValueError(
            "concurrency is for a closed loop: the items of this workload have times at which they are due"
        )
    sender = _Sender(client, workload.sampling, run, timeout_s)
    pending = iter(enumerate(workload.items))
    # the tasks begin when this one waits, by when making them has taken its time
    start_s = time.monotonic() + MAKING_S * len(workload.items)
    num_workers = len(workload.items) if concurrency is None else min(concurrency, len(workload.items))
    if concurrency is None:
        workers = [asyncio.create_task(sender.send_when_due(index, item, start_s)) for index, item in pending]
    else:
        workers = [asyncio.create_task(_work(sender, pending)) for _ in range(num_workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(sender: _Sender, pending: Iterator[tuple[int, WorkItem]]) -> None:
    for index, item in pending:
        await sender.send(index, item, due_s=None)


class _Sender:
    def __init__(self, client: AsyncClient, sampling: Mapping[str, Any], run: LoadRun, timeout_s: float | None) -> None:
        self._client = client
        self._sampling = sampling
        self._run = run
        self._timeout_s = timeout_s

    async def send_when_due(self, index: int, item: WorkItem, start_s: float) -> None:
        if item.due_s is None:
            await self.send(index, item, due_s=None)
            return
        due_s = start_s + item.due_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await self.send(index, item, due_s)

    async def send(self, index: int, item: WorkItem, due_s: float | None) -> None:
        run = self._run
        chunks: list[Chunk] = []
        num_input_tokens, num_tokens = 0, 0
        # stays unless the answer comes to its end, is left, or the server says something else
        outcome = Outcome.ABORTED
        error: str | None = ABORTED
        run.num_sent += 1
        sampling = {**self._sampling, **item.sampling}
        sent_s = time.monotonic()
        stream = self._client.stream(item.prompt, max_tokens=item.max_tokens, timeout_s=self._timeout_s, **sampling)
        try:
            async with aclosing(stream):
                async for delta in stream:
                    chunks.append(Chunk(time.monotonic(), delta.num_output_tokens))
                    num_input_tokens = delta.num_input_tokens
                    num_tokens += delta.num_output_tokens
                    run.num_tokens += delta.num_output_tokens
                    if item.cancel_after_tokens is not None and num_tokens >= item.cancel_after_tokens:
                        outcome, error = Outcome.CANCELLED, None
                        break
                else:
                    outcome, error = Outcome.FINISHED, None
        except ServerError as failure:
            outcome, error = outcome_of(failure), str(failure)
        finally:
            run.add(
                RequestRecord(
                    index=index,
                    sent_s=sent_s,
                    ended_s=time.monotonic(),
                    num_input_tokens=num_input_tokens,
                    chunks=tuple(chunks),
                    error=error,
                    outcome=outcome,
                    request_class=item.request_class,
                    due_s=due_s,
                    is_warm_up=item.is_warm_up,
                )
            )
