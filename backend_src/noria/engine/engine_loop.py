"""The engine's thread: takes commands, turns the wheel, hands on what each turn gave.

This thread owns the engine and all beneath it; others reach it only through the command queue.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from noria.engine.engine import Engine
from noria.engine.outputs import RequestOutput, StepReport
from noria.errors import DeviceLost, EngineFailure, NoriaError
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)

# how often an idle engine shows that it is there
HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: tuple[Request, ...]
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pause:
    request_ids: tuple[int, ...]
    is_over: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop:
    """Runs an Engine until `stop`.

    deliver: called on the engine's thread, and must not block, after every step, and every HEARTBEAT_S without one.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepReport], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Pause | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="noria-engine", daemon=True)
        self._is_stopped = False
        # guards the end: whatever was submitted before it is answered, whatever comes after it is refused
        self._submitting = threading.Lock()
        self._has_ended = False
        self._last_submitted_id = 0
        self._aborted_early: set[int] = set()

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over requests that came in one call. What becomes of them, a refusal too, comes through `deliver`.

        Their ids grow from call to call. Raises EngineFailure when the engine has stopped.
        """
        with self._submitting:
            if self._has_ended:
                raise EngineFailure("the engine has stopped")
            self._commands.put(_Submit(tuple(requests), self._engine.now()))

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget these requests before the next step, also those whose `submit` is still to come."""
        self._commands.put(_Abort(tuple(request_ids)))

    def pause(self, request_ids: Sequence[int]) -> None:
        """Compute nothing more for these requests until `resume`."""
        self._commands.put(_Pause(tuple(request_ids), is_over=False))

    def resume(self, request_ids: Sequence[int]) -> None:
        self._commands.put(_Pause(tuple(request_ids), is_over=True))

    def stop(self, timeout_s: float) -> bool:
        """End every live request with an error and the thread with it. False if it did not end in time."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopped:
            is_awake = True
            try:
                is_awake = self._take_commands()
                if is_awake:
                    self._engine.step()
            except Exception as error:
                log.exception("the engine failed")
                self._abandon(EngineFailure(f"the engine failed: {error}"))
                if isinstance(error, DeviceLost):
                    log.critical("the engine stops, and its heartbeat with it: %s", error)
                    self._is_stopped = True
            self._deliver(StepReport(self._engine.take_outputs(), self._engine.stats()))
            if is_awake and not self._engine.has_work:
                self._check_integrity()
        self._refuse_late_commands()
        self._engine.close()

    def _check_integrity(self) -> None:
        """When there is nothing else to do: it takes milliseconds."""
        try:
            self._engine.check_integrity()
        except Exception as error:
            log.exception("the engine's state is damaged")
            self._abandon(EngineFailure(f"the engine failed: {error}"))
            self._deliver(StepReport(self._engine.take_outputs(), self._engine.stats()))

    def _abandon(self, error: NoriaError) -> None:
        """End all live requests. If what they hold cannot be freed the engine stops, but nobody is left waiting."""
        try:
            self._engine.fail_all(error)
            self._engine.check_integrity()
        except Exception:
            log.critical("the engine's state is damaged; it stops and must be loaded again", exc_info=True)
            self._is_stopped = True

    def _take_commands(self) -> bool:
        """Carry out what has been asked, waiting for it only when there is nothing else to do. False if there still is
        nothing."""
        wait_s = 0.0 if self._engine.has_work else self._engine.idle_s
        is_due = wait_s is not None and wait_s < HEARTBEAT_S
        try:
            self._carry_out(self._commands.get(timeout=wait_s if is_due else HEARTBEAT_S))
        except queue.Empty:
            return is_due
        with suppress(queue.Empty):
            while not self._is_stopped:
                self._carry_out(self._commands.get_nowait())
        return True

    def _carry_out(self, command: _Submit | _Abort | _Pause | _Stop) -> None:
        match command:
            case _Submit(requests, arrived_s):
                for request in requests:
                    self._add(request, arrived_s)
            case _Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
                self._aborted_early |= {one for one in request_ids if one > self._last_submitted_id}
            case _Pause(request_ids, is_over):
                for request_id in request_ids:
                    if is_over:
                        self._engine.resume(request_id)
                    else:
                        self._engine.pause(request_id)
            case _Stop():
                self._is_stopped = True
                self._engine.fail_all(EngineFailure("the model is being unloaded"))

    def _add(self, request: Request, arrived_s: float) -> None:
        """The client may have gone between its request's registration with the writer and this."""
        self._last_submitted_id = request.request_id
        if request.request_id in self._aborted_early:
            self._aborted_early.remove(request.request_id)
            self._engine.skip(request)
            return
        try:
            self._engine.add(request, arrived_s)
        except Exception as error:
            # here, so that the later requests of the same call are still taken
            log.exception("a request could not be added")
            self._abandon(EngineFailure(f"the engine failed: {error}"))

    def _refuse_late_commands(self) -> None:
        """Requests that were handed over while the engine stopped."""
        with self._submitting:
            self._has_ended = True
        error = EngineFailure("the engine has stopped")
        outputs: list[RequestOutput] = []
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Submit):
                outputs += [
                    RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)
                    for request in command.requests
                ]
        self._deliver(StepReport(tuple(outputs), self._engine.stats()))
