"""The load as a process of its own: `python -m soak.load JOB`, with JOB a JSON object of `Job`'s fields.

Clients that each send one request after another. What a client sends depends on the seed and its number alone; how far
it comes depends on the server. Tells on standard output how each request ended, a JSON object a line. Knows how each of
them must end, and nothing of what the server is made of.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from enum import Enum

from noria_bench.chance import stream_seed
from noria_bench.load import LoadRun, run_load
from noria_bench.records import Outcome, RequestRecord
from noria_bench.workload import WorkItem, Workload, prompt_text
from noria_client.client import AsyncClient

PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (1, 128)
# after so many, it is no use to go on
MAX_PROBLEMS = 10
# of max_tokens when nothing else is wrong with a request: more than any model has room for
TOO_LONG = 10**9
INVALID: tuple[dict[str, object], ...] = ({"temperature": -1.0}, {"top_p": 2.0}, {"no_such_parameter": 1}, {})


class Kind(str, Enum):
    """What is asked of a request: to end with its whole answer, to be left midway, to be refused."""

    ORDINARY = "ordinary"
    CANCELLED = "cancelled"
    INVALID = "invalid"


@dataclass(frozen=True)
class Job:
    """url: host:port of the server's gRPC. seconds: after which no request is sent any more.

    cancel_share, invalid_share: of the requests. reconnect_share: of the requests after which the client closes its
    connection and makes another one.
    """

    url: str
    concurrency: int
    seconds: float
    seed: int
    cancel_share: float
    invalid_share: float
    reconnect_share: float


@dataclass(frozen=True)
class Ended:
    """problem: why it should not have ended so; None if it did as it should."""

    kind: Kind
    num_tokens: int
    has_reconnected: bool
    problem: str | None


def draw(rng: random.Random, job: Job) -> WorkItem:
    chance, num_prompt_tokens = rng.random(), rng.randint(*PROMPT_TOKENS)
    prompt = prompt_text(rng, num_prompt_tokens)
    if chance < job.invalid_share:
        sampling = rng.choice(INVALID)
        max_tokens = OUTPUT_TOKENS[1] if sampling else TOO_LONG
        return WorkItem(prompt, num_prompt_tokens, max_tokens, request_class=Kind.INVALID.value, sampling=sampling)
    if chance < job.invalid_share + job.cancel_share:
        # one of a single token has no middle
        max_tokens = rng.randint(max(2, OUTPUT_TOKENS[0]), OUTPUT_TOKENS[1])
        after = rng.randint(1, max_tokens - 1)
        return WorkItem(
            prompt, num_prompt_tokens, max_tokens, cancel_after_tokens=after, request_class=Kind.CANCELLED.value
        )
    return WorkItem(prompt, num_prompt_tokens, rng.randint(*OUTPUT_TOKENS), request_class=Kind.ORDINARY.value)


def problem_of(item: WorkItem, record: RequestRecord) -> str | None:
    """Why the request should not have ended as it did."""
    kind, said = Kind(item.request_class), record.error or record.outcome.value
    if kind is Kind.INVALID:
        name = next(iter(item.sampling), "max_tokens")
        if record.outcome is Outcome.FAILED and name in said:
            return None
        return f"a request with an invalid {name} was not refused by that name: {said}"
    if kind is Kind.CANCELLED:
        return None if record.outcome is Outcome.CANCELLED else f"a request that was to be cancelled failed: {said}"
    if record.outcome is not Outcome.FINISHED:
        return f"a request failed: {said}"
    if record.num_output_tokens != item.max_tokens:
        return f"an answer has {record.num_output_tokens} tokens, not {item.max_tokens}"
    return None


class _Clients:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._end_s = time.monotonic() + job.seconds
        self._num_problems = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._job.concurrency)))

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._end_s and self._num_problems < MAX_PROBLEMS

    async def _client(self, number: int) -> None:
        rng = random.Random(stream_seed(self._job.seed, "client", number))
        has_reconnected = False
        while self._goes_on:
            # with error codes, tritonserver 2.51 crashes after some hundred requests that were refused
            async with AsyncClient(self._job.url) as client:
                while self._goes_on:
                    await self._send(client, draw(rng, self._job), has_reconnected)
                    has_reconnected = rng.random() < self._job.reconnect_share
                    if has_reconnected:
                        break

    async def _send(self, client: AsyncClient, item: WorkItem, has_reconnected: bool) -> None:
        run = LoadRun(1)
        await run_load(client, Workload((item,)), run)
        (record,) = run.records
        problem = problem_of(item, record)
        self._num_problems += problem is not None
        ended = Ended(Kind(item.request_class), record.num_output_tokens, has_reconnected, problem)
        print(json.dumps(asdict(ended)), flush=True)


if __name__ == "__main__":
    asyncio.run(_Clients(Job(**json.loads(sys.argv[1]))).run())
