"""The engine: requests in, text out, one step at a time. Single-threaded; `engine_loop` gives it a thread.

Joins the scheduler, the model runner and the text of each request. Knows nothing of Triton or of who is waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput
from noria.engine.request_timings import RequestTimer
from noria.engine.text import IncrementalText, TextTokenizer
from noria.engine.trace import StepTrace
from noria.errors import DeadlineExceeded, EngineFailure, InvalidRequest, NoriaError, Overloaded
from noria.scheduler_output import SampledToken, SchedulerOutput, StepResult
from noria.scheduling.scheduler import Scheduler
from noria.scheduling.sequence_update import SequenceUpdate
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)

DEADLINE_PASSED = "the request's timeout passed before it was done (its own, its priority class's or default_timeout_s)"


class Runner(Protocol):
    """Computes what the scheduler decided: `runtime.model_runner.ModelRunner`, or a fake in tests."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


@dataclass(slots=True)
class _LiveRequest:
    text: IncrementalText
    timer: RequestTimer


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
        # every request that has not been given its last output yet
        self._live: dict[int, _LiveRequest] = {}
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

    def now(self) -> float:
        """Seconds on the engine's clock, which any thread may read."""
        return self._clock()

    def stats(self) -> EngineStats:
        return self._counter.snapshot(self._scheduler)

    def add(self, request: Request, arrived_s: float | None = None) -> None:
        """Queue a request, or end it at once if it is refused. arrived_s: on the engine's clock; None is now."""
        now = self._clock()
        try:
            level = self._scheduler.level_of(request)
        except InvalidRequest as error:
            self._counter.count_invalid()
            self._outputs.append(RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            return
        params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
        self._live[request.request_id] = _LiveRequest(
            IncrementalText(self._tokenizer, params.stop, params.skip_special_tokens, params.min_tokens),
            RequestTimer(level, num_prompt_tokens, now if arrived_s is None else arrived_s),
        )
        try:
            self._scheduler.add(request, now)
        except NoriaError as error:
            self._end(request.request_id, FinishReason.ERROR, error)
            return
        self._counter.count_prompt(num_prompt_tokens)

    def skip(self, request: Request) -> None:
        """Instead of `add`, when the client has left already: nobody is told, but it counts as cancelled."""
        try:
            self._counter.count_end(self._scheduler.level_of(request), FinishReason.CANCELLED)
        except InvalidRequest:
            self._counter.count_invalid()

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
        for request_id in list(self._live):
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
        self._note_places(scheduled, now)
        self._compute(scheduled, now)
        self._counter.count_step_time(self._clock() - now)

    def close(self) -> None:
        """Finish the trace. Nothing is computed afterwards."""
        if self._trace is not None:
            self._trace.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or requests have been lost; for tests and for idle moments."""
        self._scheduler.check_integrity()
        assert set(self._live) == set(self._scheduler.live_request_ids()), "a request's text outlived it"

    def _note_places(self, scheduled: SchedulerOutput, now: float) -> None:
        for request_id in scheduled.admitted_request_ids:
            self._live[request_id].timer.note_scheduled(now)
        for request_id in scheduled.preempted_request_ids:
            self._live[request_id].timer.num_preemptions += 1

    def _compute(self, scheduled: SchedulerOutput, started_s: float) -> None:
        try:
            result = self._runner.execute(scheduled)
        except Exception as error:
            self._record(scheduled, started_s)
            log.exception("a step failed")
            failure = EngineFailure(f"the step that computed this request failed: {error}")
            for request_id in self._scheduler.abandon(scheduled):
                self._end(request_id, FinishReason.ERROR, failure)
            return
        self._record(scheduled, started_s)
        drawn_s = self._clock()
        for update in self._scheduler.update(scheduled, result):
            self._take(update, drawn_s)

    def _record(self, scheduled: SchedulerOutput, started_s: float) -> None:
        """Before `update`, which changes what the rows refer to."""
        if self._trace is not None:
            self._trace.record_step(scheduled, started_s, self._clock())

    def _take(self, update: SequenceUpdate, drawn_s: float) -> None:
        if update.token is None:
            self._end(update.request_id, FinishReason.ERROR, EngineFailure(update.error or "the step failed"))
            return
        self._counter.count_generated()
        self._live[update.request_id].timer.note_token(drawn_s)
        text, reason = self._advance_text(update.request_id, update.token, update.finish_reason)
        if reason is not None:
            self._end(update.request_id, reason, text=text, token=update.token)
        else:
            self._outputs.append(RequestOutput(update.request_id, text, (update.token,)))

    def _advance_text(
        self, request_id: int, token: SampledToken, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """The text that `token` releases, and why the request ends here, if it does. A stop token has no text."""
        state = self._live[request_id].text
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
        timer, now = self._live.pop(request_id).timer, self._clock()
        if self._trace is not None:
            self._trace.record_end(request_id, reason, now)
        self._counter.count_end(timer.level, reason, is_refused=isinstance(error, Overloaded))
        tokens = (token,) if token else ()
        self._outputs.append(RequestOutput(request_id, text, tokens, reason, error, timer.end(now, reason)))
