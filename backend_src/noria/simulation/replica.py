"""One engine in virtual time: the real scheduler behind a model of Triton's queue, with a cost model for a runner.

Draws no tokens: a request's tokens are all alike, and it ends when it has its number of them. Knows neither where
requests come from nor that there may be other replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from noria.config import EngineConfig
from noria.errors import EngineFailure, NoriaError
from noria.sampling_params import SamplingParams
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.scheduling.build import build_scheduler
from noria.sequence import Request
from noria.simulation.batch_former import BatchFormer, DynamicBatching, dynamic_batching_for
from noria.simulation.cost_model import CostModel
from noria.simulation.records import Outcome, RequestRecord, StepCounters
from noria.simulation.requests import SimRequest, distinct_prompt

# ids that no prompt of `arrivals` holds
_TOKEN = SampledToken(2**31 - 1)
_LAST_TOKEN = SampledToken(2**31 - 2)


@dataclass(slots=True)
class _Live:
    """A request that has not ended. num_left: output tokens that it has yet to get."""

    request: SimRequest
    sent_s: float
    num_left: int
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    token_times_s: list[float] = field(default_factory=list)


class Replica:
    """Its owner moves the time: `submit` when a request arrives, `advance` when next_event_s is reached.

    config: as of a real engine; its sizes of the cache are not read. num_blocks, num_host_blocks: of the KV cache and
    of the host pool. batching: Triton's queue in front of it; None is what the project's configs say.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        cost_model: CostModel,
        *,
        num_host_blocks: int = 0,
        batching: DynamicBatching | None = None,
        number: int = 0,
    ) -> None:
        self._scheduler = build_scheduler(config, num_blocks, num_host_blocks)
        self._cost_model = cost_model
        self._former: BatchFormer[int] = BatchFormer(batching or dynamic_batching_for(config))
        self._is_closed = config.batching_mode != "inflight"
        self._block_size = config.block_size
        self._num_blocks = num_blocks
        self._number = number
        self._live: dict[int, _Live] = {}
        self._num_batches = 0
        # the step under way
        self._output: SchedulerOutput | None = None
        self._step_end_s = math.inf
        self.counters = StepCounters()
        self.num_outstanding_tokens = 0

    @property
    def next_event_s(self) -> float:
        """When `advance` is due; -inf is at once, inf only after a `submit`."""
        return self._step_end_s if self._output is not None else self._former.due_s

    @property
    def num_waiting(self) -> int:
        """Requests in Triton's queue and in the scheduler's."""
        return len(self._former) + self._scheduler.num_waiting

    @property
    def num_running_tokens(self) -> int:
        """Tokens of the sequences in the step under way, once it has run."""
        return self._output.num_live_kv_tokens if self._output else 0

    @property
    def kv_share(self) -> float:
        """Of the blocks, held by sequences in the step under way."""
        return self._output.num_allocated_blocks / self._num_blocks if self._output else 0.0

    @property
    def is_idle(self) -> bool:
        return not self._live

    def submit(self, index: int, request: SimRequest, now: float) -> None:
        """index: tells requests apart. It joins the engine after the step under way."""
        self._live[index] = _Live(request, now, request.num_output_tokens)
        self._former.add(index, now)
        self.num_outstanding_tokens += request.num_prompt_tokens + request.max_output_tokens

    def advance(self, now: float) -> list[RequestRecord]:
        """Ends the step under way, which is over at `now`, and begins the next; the requests that ended."""
        ended: list[RequestRecord] = []
        if self._output is not None:
            self._finish_step(self._output, now, ended)
        # a batch may be refused as a whole, and the next be due
        while not self._take(now, ended) and self._former.due_s <= now:
            pass
        self._output = self._begin_step(now) if self._scheduler.has_work else None
        return ended

    def _take(self, now: float, ended: list[RequestRecord]) -> bool:
        """Requests from the queue into the scheduler, where the mode allows it. Whether there is work after it."""
        if not (self._is_closed and self._scheduler.has_work):
            batch = self._former.take(now)
            self._num_batches += bool(batch)
            for index in batch:
                self._add(index, now, ended)
        for index in self._scheduler.expire(now):
            ended.append(self._end(index, Outcome.DEADLINE, now, "the request's timeout passed before it was done"))
        return self._scheduler.has_work

    def _add(self, index: int, now: float, ended: list[RequestRecord]) -> None:
        try:
            self._scheduler.add(self._engine_request(index, now), now)
        except NoriaError as error:
            ended.append(self._end(index, Outcome.REJECTED, now, str(error)))

    def _engine_request(self, index: int, now: float) -> Request:
        request = self._live[index].request
        params = SamplingParams(
            max_tokens=request.max_output_tokens, temperature=0.0, priority=request.priority, user=request.user
        )
        prompt = request.prompt_token_ids or distinct_prompt(index, request.num_prompt_tokens)
        deadline = None if request.timeout_s is None else now + request.timeout_s
        stops = frozenset((_LAST_TOKEN.token_id,))
        return Request(index, prompt, params, 0, stops, deadline, batch_id=self._num_batches)

    def _begin_step(self, now: float) -> SchedulerOutput:
        output = self._scheduler.schedule(now)
        # a step may only copy blocks, or drive somebody out, and the next compute
        if not (output.rows or output.block_copies or output.preempted_request_ids):
            raise EngineFailure(f"nothing can be scheduled though {output.num_waiting} requests wait")
        for index in output.admitted_request_ids:
            if self._live[index].first_scheduled_s is None:
                self._live[index].first_scheduled_s = now
        for index in output.preempted_request_ids:
            self._live[index].num_preemptions += 1
        seconds = self._cost_model.step_time_s(output)
        if output.rows:
            self.counters.count(output, seconds, self._block_size)
        self._step_end_s = now + seconds
        return output

    def _finish_step(self, output: SchedulerOutput, now: float, ended: list[RequestRecord]) -> None:
        result: StepResult = {
            row.request_id: _LAST_TOKEN if self._live[row.request_id].num_left == 1 else _TOKEN
            for row in output.rows
            if row.sampling is not None
        }
        for update in self._scheduler.update(output, result):
            live = self._live[update.request_id]
            live.num_left -= 1
            live.token_times_s.append(now)
            if update.finish_reason is not None:
                ended.append(self._end(update.request_id, Outcome.FINISHED, now))

    def _end(self, index: int, outcome: Outcome, now: float, error: str | None = None) -> RequestRecord:
        live = self._live.pop(index)
        request = live.request
        self.num_outstanding_tokens -= request.num_prompt_tokens + request.max_output_tokens
        return RequestRecord(
            index=index,
            replica=self._number,
            outcome=outcome,
            sent_s=live.sent_s,
            first_scheduled_s=live.first_scheduled_s,
            token_times_s=tuple(live.token_times_s),
            ended_s=now,
            num_input_tokens=request.num_prompt_tokens,
            num_preemptions=live.num_preemptions,
            user=request.user,
            priority=request.priority,
            error=error,
        )
