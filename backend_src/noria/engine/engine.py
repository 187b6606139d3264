"""The engine: requests in, text out, one step at a time. Single-threaded; `engine_loop` gives it a thread.

Joins the scheduler, the model runner and the text of each request. Knows nothing of Triton or of who is waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput
from noria.engine.text import IncrementalText, TextTokenizer
from noria.engine.trace import StepTrace
from noria.errors import DeadlineExceeded, EngineFailure, InvalidRequest, NoriaError, Overloaded
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.scheduling.scheduler import Scheduler, SequenceUpdate
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)

DEADLINE_PASSED = "the request's timeout passed before it was done (its own, its priority class's or default_timeout_s)"


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
        trace: StepTrace | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._counter = counter
        self._clock = clock
        self._trace = trace
        # text of every request that has not been given its last output yet
        self._texts: dict[int, IncrementalText] = {}
        self._outputs: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def idle_s(self) -> float | None:
        """Without work: seconds until a paused request's deadline, None where there is none to wait for."""
        deadline = self._scheduler.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """What has come since the last call. Kept here, so that an exception on the way loses nobody's last output."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return self._counter.snapshot(scheduler)

    def add(self, request: Request) -> None:
        """Queue a request, or end it at once if it is refused."""
        params = request.params
        self._texts[request.request_id] = IncrementalText(
            self._tokenizer, params.stop, params.skip_special_tokens, params.min_tokens
        )
        try:
            self._scheduler.add(request, self._clock())
        except InvalidRequest as error:
            # as one that is refused before it comes here, it is counted nowhere
            del self._texts[request.request_id]
            self._outputs.append(RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            return
        except NoriaError as error:
            self._end(request.request_id, FinishReason.ERROR, error)
            return
        self._counter.count_prompt(len(request.prompt_token_ids))

    def abort(self, request_id: int) -> None:
        """The client has gone: free all that the request holds. Nothing happens if it has already ended."""
        if self._scheduler.finish(request_id, FinishReason.CANCELLED):
            self._end(request_id, FinishReason.CANCELLED)

    def pause(self, request_id: int) -> None:
        """The client reads too slowly: compute for others until `resume`. A closed batch goes on regardless."""
        self._scheduler.pause(request_id)

    def resume(self, request_id: int) -> None:
        self._scheduler.resume(request_id)

    def fail_all(self, error: NoriaError) -> None:
        """End every request that has not ended with `error`, then free what they hold."""
        for request_id in list(self._texts):
            self._end(request_id, FinishReason.ERROR, error)
        for request_id in self._scheduler.live_request_ids():
            self._scheduler.finish(request_id, FinishReason.ERROR)

    def step(self) -> None:
        """Compute one step, if there is something to compute. A failed step fails just the requests in it."""
        now = self._clock()
        for request_id in self._scheduler.expire(now):
            error = DeadlineExceeded(DEADLINE_PASSED)
            self._end(request_id, FinishReason.DEADLINE, error)
        scheduled = self._scheduler.schedule(now)
        if not scheduled.rows and self._scheduler.has_work:
            # the watchdog: a policy that leaves everybody waiting is a fault, and to keep silent would be another
            log.error("nothing can be scheduled though %d requests wait", scheduled.num_waiting)
            self.fail_all(EngineFailure("the scheduler found no way to go on with this request"))
            return
        if not scheduled.rows and not scheduled.block_copies:
            return
        self._counter.count_step(scheduled)
        try:
            result = self._runner.execute(scheduled)
        except Exception as error:
            self._record(scheduled, now)
            log.exception("a step failed")
            failure = EngineFailure(f"the step that computed this request failed: {error}")
            for request_id in self._scheduler.abandon(scheduled):
                self._end(request_id, FinishReason.ERROR, failure)
            return
        self._record(scheduled, now)
        for update in self._scheduler.update(scheduled, result):
            self._take(update)

    def close(self) -> None:
        """Finish the trace. Nothing is computed afterwards."""
        if self._trace is not None:
            self._trace.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or requests have been lost; for tests and for idle moments."""
        self._scheduler.check_integrity()
        assert set(self._texts) == set(self._scheduler.live_request_ids()), "a request's text outlived it"

    def _record(self, scheduled: SchedulerOutput, started_s: float) -> None:
        """Before `update`, which changes what the rows refer to."""
        if self._trace is not None:
            self._trace.record_step(scheduled, started_s, self._clock())

    def _take(self, update: SequenceUpdate) -> None:
        if update.token is None:
            self._end(update.request_id, FinishReason.ERROR, EngineFailure(update.error or "the step failed"))
            return
        self._counter.count_generated()
        text, reason = self._advance_text(update.request_id, update.token, update.finish_reason)
        if reason is not None:
            self._end(update.request_id, reason, text=text, token=update.token)
        else:
            self._outputs.append(RequestOutput(update.request_id, text, (update.token,)))

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

    def _end(
        self,
        request_id: int,
        reason: FinishReason,
        error: NoriaError | None = None,
        text: str = "",
        token: SampledToken | None = None,
    ) -> None:
        """The last output of a request."""
        del self._texts[request_id]
        if self._trace is not None:
            self._trace.record_end(request_id, reason, self._clock())
        self._counter.count_end(reason, is_refused=isinstance(error, Overloaded))
        self._outputs.append(RequestOutput(request_id, text, (token,) if token else (), reason, error))
