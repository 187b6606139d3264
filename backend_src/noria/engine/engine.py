"""The engine: requests in, text out, one step at a time. Single-threaded; `engine_loop` gives it a thread.

Joins the scheduler, the model runner and the text of each request. Knows nothing of Triton or of who is waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from noria.engine.launched_step import AheadRunner, FailedLaunch, LaunchedStep, Runner, StepAtOnce
from noria.engine.metrics import StatsCounter
from noria.engine.outputs import EngineStats, RequestOutput
from noria.engine.request_timings import RequestTimer
from noria.engine.text import IncrementalText, TextTokenizer
from noria.engine.trace import StepTrace
from noria.errors import DeadlineExceeded, DeviceLost, EngineFailure, InvalidRequest, NoriaError, Overloaded
from noria.scheduler_output import PendingStep, SampledToken, SchedulerOutput
from noria.scheduling.scheduler import Scheduler
from noria.scheduling.sequence_update import SequenceUpdate
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)

DEADLINE_PASSED = "the request's timeout passed before it was done (its own, its priority class's or default_timeout_s)"


@dataclass(slots=True)
class _LiveRequest:
    text: IncrementalText
    timer: RequestTimer


class Engine:
    """One loop, three verbs: schedule, run, update; then text.

    With `ahead` a step is decided and launched while the one before it is computed, and only then is the result of that
    one taken in: the device need not wait for the host. A request that ends by its tokens (a stop token or string) has
    a row in one more step, of which nothing comes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: TextTokenizer,
        counter: StatsCounter,
        clock: Callable[[], float] = time.monotonic,
        trace: StepTrace | None = None,
        ahead: AheadRunner | None = None,
    ) -> None:
        """ahead: launches the steps in place of `runner`; for in-flight mode only."""
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = ahead
        # the step whose result has not been taken in; with `ahead`, also between two calls of `step`
        self._launched: LaunchedStep | None = None
        self._last_result_s = 0.0
        self._tokenizer = tokenizer
        self._counter = counter
        self._clock = clock
        self._trace = trace
        # every request that has not been given its last output yet
        self._live: dict[int, _LiveRequest] = {}
        self._outputs: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        return self._launched is not None or self._scheduler.has_work

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
        """End every request that has not ended with `error`, then free what they hold. Nobody waits for a step."""
        self._launched = None
        for request_id in list(self._live):
            self._end(request_id, FinishReason.ERROR, error)
        for request_id in self._scheduler.live_request_ids():
            self._scheduler.finish(request_id, FinishReason.ERROR)

    def step(self) -> None:
        """Compute one step, if there is something to compute. A failed step fails just the requests in it.

        With `ahead`: launch one, and take in the one before it; or just that, where nothing is left to be launched. If
        that one turns out to have failed, the one launched behind it fails too.
        """
        now = self._clock()
        for request_id in self._scheduler.expire(now):
            error = DeadlineExceeded(DEADLINE_PASSED)
            self._end(request_id, FinishReason.DEADLINE, error)
        if self._launched is not None and not self._scheduler.can_run_ahead(self._launched.output):
            self._take_result()
        scheduled = self._scheduler.schedule(now)
        if not scheduled.rows and self._scheduler.has_work and self._launched is None:
            # the watchdog: a policy that leaves everybody waiting is a fault, and to keep silent would be another
            log.error("nothing can be scheduled though %d requests wait", scheduled.num_waiting)
            self.fail_all(EngineFailure("the scheduler found no way to go on with this request"))
            return
        if scheduled.rows or scheduled.block_copies:
            self._launch(scheduled, now)
        elif self._launched is not None:
            self._take_result()
        else:
            return
        self._counter.count_step_time(self._clock() - now)

    def close(self) -> None:
        """Finish the trace. Nothing is computed afterwards."""
        if self._trace is not None:
            self._trace.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or requests have been lost; for tests and for idle moments."""
        self._scheduler.check_integrity()
        assert set(self._live) == set(self._scheduler.live_request_ids()), "a request's text outlived it"

    def _launch(self, scheduled: SchedulerOutput, asked_s: float) -> None:
        """Hand the step to the runner, and take in the one before it, which has been computed meanwhile."""
        pending = self._submit(scheduled)
        if self._launched is not None and not self._take_result():
            # this step was to go on from what has failed
            self._fail(scheduled, EngineFailure("the step before the one that computed this request failed"))
            return
        late_request_ids = self._scheduler.advance(scheduled)
        self._counter.count_step(scheduled, late_request_ids)
        started_s = max(asked_s, self._last_result_s)
        self._note_places(scheduled, started_s)
        self._launched = LaunchedStep(scheduled, pending, started_s, late_request_ids)
        if isinstance(pending, StepAtOnce | FailedLaunch):
            self._take_result()

    def _submit(self, scheduled: SchedulerOutput) -> PendingStep:
        if self._ahead is None:
            return StepAtOnce(lambda: self._runner.execute(scheduled))
        try:
            return self._ahead.submit(scheduled)
        except Exception as error:
            return FailedLaunch(error)

    def _note_places(self, scheduled: SchedulerOutput, started_s: float) -> None:
        """Of requests that are live: with `ahead`, some may have ended since the step was decided."""
        for request_id in scheduled.admitted_request_ids:
            if request_id in self._live:
                self._live[request_id].timer.note_scheduled(started_s)
        for request_id in scheduled.preempted_request_ids:
            if request_id in self._live:
                self._live[request_id].timer.num_preemptions += 1

    def _take_result(self) -> bool:
        """Wait for the launched step and hand on what it gave. False if it failed."""
        step, self._launched = self._launched, None
        assert step is not None
        try:
            result = step.pending.result()
        except DeviceLost:
            # not of this step alone: whoever runs the engine ends it
            raise
        except Exception as error:
            self._record(step)
            log.exception("a step failed")
            self._fail(step.output, EngineFailure(f"the step that computed this request failed: {error}"))
            return False
        self._record(step)
        drawn_s = self._last_result_s = self._clock()
        for update in self._scheduler.take_result(step.output, result):
            self._take(update, drawn_s)
        return True

    def _fail(self, scheduled: SchedulerOutput, failure: EngineFailure) -> None:
        for request_id in self._scheduler.abandon(scheduled):
            self._end(request_id, FinishReason.ERROR, failure)

    def _record(self, step: LaunchedStep) -> None:
        if self._trace is not None:
            self._trace.record_step(step.output, step.started_s, self._clock(), step.late_request_ids)

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
