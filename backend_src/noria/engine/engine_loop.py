"""The engine's thread: takes commands, turns the wheel, hands on what each turn gave.

This thread owns the engine and all beneath it; others reach it only through the command queue.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noria.engine.engine import Engine
from noria.engine.outputs import RequestOutput, StepReport
from noria.errors import EngineFailure, NoriaError
from noria.sequence import FinishReason, Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _FailAll:
    error: NoriaError
    and_stop: bool


class EngineLoop:
    """Runs an Engine until `stop`. `deliver` is called on the engine's thread and must not block."""

    def __init__(self, engine: Engine, deliver: Callable[[StepReport], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Submit | _Abort | _FailAll] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="noria-engine", daemon=True)
        self._is_stopped = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over requests that came in one call. What becomes of them, a refusal too, comes through `deliver`.

        Raises EngineFailure when the engine has stopped.
        """
        if self._is_stopped or not self._thread.is_alive():
            raise EngineFailure("the engine has stopped")
        self._commands.put(_Submit(tuple(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        """Forget these requests before the next step."""
        self._commands.put(_Abort(tuple(request_ids)))

    def fail_all(self, error: NoriaError) -> None:
        """End every live request with `error`; later ones are served."""
        self._commands.put(_FailAll(error, and_stop=False))

    def stop(self, timeout_s: float) -> bool:
        """End every live request with an error and the thread with it. False if it did not end in time."""
        self._commands.put(_FailAll(EngineFailure("the model is being unloaded"), and_stop=True))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopped:
            outputs: list[RequestOutput] = []
            try:
                outputs += self._take_commands()
                outputs += self._engine.step()
                if not self._engine.has_work:
                    self._engine.check_integrity()
            except Exception as error:
                log.exception("the engine failed")
                outputs += self._abandon(EngineFailure(f"the engine failed: {error}"))
            self._deliver(StepReport(tuple(outputs), self._engine.stats()))
        self._refuse_late_commands()

    def _abandon(self, error: NoriaError) -> list[RequestOutput]:
        """End all live requests. If not even that works the engine stops, but nobody is left waiting."""
        request_ids = self._engine.live_request_ids()
        try:
            return self._engine.fail_all(error)
        except Exception:
            log.critical("the engine's state is damaged; it stops and must be loaded again", exc_info=True)
            self._is_stopped = True
            return [_refusal(request_id, error) for request_id in request_ids]

    def _take_commands(self) -> list[RequestOutput]:
        """Carry out what has been asked, waiting for it only when there is nothing else to do."""
        outputs: list[RequestOutput] = []
        try:
            command = self._commands.get(block=not self._engine.has_work)
            while True:
                outputs += self._carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return outputs

    def _carry_out(self, command: _Submit | _Abort | _FailAll) -> list[RequestOutput]:
        match command:
            case _Submit(requests):
                return [output for request in requests for output in self._engine.add(request)]
            case _Abort(request_ids):
                return [output for request_id in request_ids for output in self._engine.abort(request_id)]
            case _FailAll(error, and_stop):
                self._is_stopped = self._is_stopped or and_stop
                return self._engine.fail_all(error)

    def _refuse_late_commands(self) -> None:
        """Requests that were handed over while the engine stopped."""
        error = EngineFailure("the engine has stopped")
        outputs: list[RequestOutput] = []
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Submit):
                outputs += [_refusal(request.request_id, error) for request in command.requests]
        self._deliver(StepReport(tuple(outputs), self._engine.stats()))


def _refusal(request_id: int, error: NoriaError) -> RequestOutput:
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
