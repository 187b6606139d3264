"""Measures the same workload on one server per batching mode.

Knows how to measure a running server; how one is started is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from rich.console import Console

from noria_bench.engine_counters import EngineCounters
from noria_bench.load import LoadRun, run_load
from noria_bench.progress import show_progress
from noria_bench.report import ModeResult, summarise
from noria_bench.server_metrics import scrape_settled
from noria_bench.workload import Workload
from noria_client.client import DEFAULT_MODEL, AsyncClient, Client
from noria_client.errors import ServerError

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServerUrls:
    """host:port of each of a server's endpoints."""

    grpc: str
    http: str
    metrics: str


def compare(
    modes: Sequence[str],
    start_server: Callable[[str], AbstractContextManager[ServerUrls]],
    workload: Workload,
    *,
    model: str = DEFAULT_MODEL,
    concurrency: int | None = None,
    console: Console | None = None,
) -> list[ModeResult]:
    """One result per mode, in order.

    start_server: gives a ready server in a mode, and stops it at the end of the context.
    concurrency: requests under way at a time; None sends all at once.

    Ctrl-C cancels the requests on the server and ends the comparison: the last result then says `is_interrupted`, or
    there are fewer results than modes. Raises ServerError if a warm-up request fails.
    """
    console = console or Console(stderr=True)
    results: list[ModeResult] = []
    try:
        for mode in modes:
            console.print(f"{mode}: starting the server", highlight=False)
            with start_server(mode) as urls:
                result = measure(mode, urls, workload, model=model, concurrency=concurrency, console=console)
            results.append(result)
            if result.is_interrupted:
                break
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
    return results


def measure(
    mode: str,
    urls: ServerUrls,
    workload: Workload,
    *,
    model: str = DEFAULT_MODEL,
    concurrency: int | None = None,
    console: Console,
) -> ModeResult:
    """Warms the server up with one request, then sends the workload. Ctrl-C gives the result of what there is."""
    with Client(urls.grpc, model=model) as client:
        _warm_up(client, workload)
    before = _counters(urls, model, console)
    run = LoadRun(num_requests=len(workload.items))
    is_interrupted = False
    try:
        asyncio.run(_load(mode, urls, workload, model, concurrency, run, console))
    except KeyboardInterrupt:
        is_interrupted = True
    after = _counters(urls, model, console)
    grown = after - before if before and after else None
    return summarise(mode, len(workload.items), run.records, grown, is_interrupted)


def _warm_up(client: Client, workload: Workload) -> None:
    """With the workload's own kinds of inputs; what is compiled, mapped or cached on first use is so afterwards."""
    item = replace(workload.items[0], max_tokens=min(workload.items[0].max_tokens, WARM_UP_TOKENS))
    for _delta in client.stream(item.prompt, max_tokens=item.max_tokens, **workload.sampling):
        pass


async def _load(
    mode: str,
    urls: ServerUrls,
    workload: Workload,
    model: str,
    concurrency: int | None,
    run: LoadRun,
    console: Console,
) -> None:
    async with AsyncClient(urls.grpc, model=model) as client:
        display = asyncio.create_task(show_progress(run, mode, console))
        try:
            await run_load(client, workload, run, concurrency)
        finally:
            display.cancel()
            await asyncio.gather(display, return_exceptions=True)


def _counters(urls: ServerUrls, model: str, console: Console) -> EngineCounters | None:
    """The engine's counters once it is idle. A server without metrics can still be measured from outside."""
    try:
        return scrape_settled(urls.metrics, model)
    except ServerError as error:
        console.print(f"no server metrics: {error}", highlight=False, markup=False)
        return None
