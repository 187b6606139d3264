"""The engine: requests in, text out, one step at a time. Single-threaded; `engine_loop` gives it a thread.

Joins the scheduler, the model runner and the text of each request. Knows nothing of Triton or of who is waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput
from noria.engine.text import IncrementalText, TextTokenizer
from noria.errors import DeadlineExceeded, EngineFailure, NoriaError
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.scheduling.scheduler import Scheduler, SequenceUpdate
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes what the scheduler decided: `runtime.model_runner.ModelRunner`, or a fake in tests."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


class Engine:
    """One loop, three verbs: schedule, run, update; then text."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: TextTokenizer,
        counter: StatsCounter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._counter = counter
        self._clock = clock
        self._texts: dict[int, IncrementalText] = {}

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def live_request_ids(self) -> list[int]:
        return self._scheduler.live_request_ids()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return self._counter.snapshot(scheduler.num_running, scheduler.num_waiting, scheduler.num_free_blocks)

    def add(self, request: Request) -> list[RequestOutput]:
        """Queue a request. Returns its failure, if it is refused, else nothing."""
        try:
            self._scheduler.add(request)
        except NoriaError as error:
            self._counter.count_end(has_failed=True)
            return [RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)]
        self._counter.count_prompt(len(request.prompt_token_ids))
        params = request.params
        self._texts[request.request_id] = IncrementalText(
            self._tokenizer, params.stop, params.skip_special_tokens, params.min_tokens
        )
        return []

    def abort(self, request_id: int) -> list[RequestOutput]:
        """The client has gone: free all that the request holds. Nothing happens if it has already ended."""
        if not self._scheduler.finish(request_id, FinishReason.CANCELLED):
            return []
        return [self._end(request_id, FinishReason.CANCELLED, None)]

    def fail_all(self, error: NoriaError) -> list[RequestOutput]:
        """End every live request with `error`."""
        return self._fail(self._scheduler.live_request_ids(), error)

    def step(self) -> list[RequestOutput]:
        """Compute one step; empty when there is nothing to compute. A failed step fails just the requests in it."""
        now = self._clock()
        outputs = [
            self._end(
                request_id, FinishReason.DEADLINE, DeadlineExceeded("the request's timeout passed before it was done")
            )
            for request_id in self._scheduler.expire(now)
        ]
        scheduled = self._scheduler.schedule(now)
        if not scheduled.rows:
            if self._scheduler.has_work:
                log.error("nothing can be scheduled though %d requests wait", scheduled.num_waiting)
                outputs += self.fail_all(EngineFailure("the scheduler found no way to go on with this request"))
            return outputs
        self._counter.count_step(scheduled)
        try:
            result = self._runner.execute(scheduled)
        except Exception as error:
            log.exception("a step failed")
            request_ids = [row.request_id for row in scheduled.rows if not row.is_padding]
            return outputs + self._fail(
                request_ids, EngineFailure(f"the step that computed this request failed: {error}")
            )
        return outputs + [self._output(update) for update in self._scheduler.update(scheduled, result)]

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or requests have been lost; for tests and for idle moments."""
        self._scheduler.check_integrity()
        assert set(self._texts) == set(self._scheduler.live_request_ids()), "a request's text outlived it"

    def _output(self, update: SequenceUpdate) -> RequestOutput:
        if update.token is None:
            error = EngineFailure(update.error or "the step failed")
            return self._end(update.request_id, FinishReason.ERROR, error)
        self._counter.count_generated()
        text, reason = self._advance_text(update.request_id, update.token, update.finish_reason)
        if reason is not None:
            return self._end(update.request_id, reason, None, text, update.token)
        return RequestOutput(update.request_id, text, (update.token,))

    def _advance_text(
        self, request_id: int, token: SampledToken, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """The text that `token` releases, and why the request ends here, if it does. A stop token has no text."""
        state = self._texts[request_id]
        text = "" if reason is FinishReason.STOP else state.push(token.token_id)
        if reason is not None:
            text += state.finish()
        if state.stop_hit is None:
            return text, reason
        self._scheduler.finish(request_id, FinishReason.STOP)
        return text, FinishReason.STOP

    def _fail(self, request_ids: Sequence[int], error: NoriaError) -> list[RequestOutput]:
        return [
            self._end(request_id, FinishReason.ERROR, error)
            for request_id in request_ids
            if self._scheduler.finish(request_id, FinishReason.ERROR)
        ]

    def _end(
        self,
        request_id: int,
        reason: FinishReason,
        error: NoriaError | None,
        text: str = "",
        token: SampledToken | None = None,
    ) -> RequestOutput:
        del self._texts[request_id]
        self._counter.count_end(has_failed=reason not in (FinishReason.STOP, FinishReason.LENGTH))
        return RequestOutput(request_id, text, (token,) if token else (), reason, error)
