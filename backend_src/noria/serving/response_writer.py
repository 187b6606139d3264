"""The one thread that talks to clients: sends what has been generated, notices who has gone, ends every reply once.

When it falls behind the engine, it merges the chunks that have piled up for a reply into one response.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from noria.engine.outputs import EngineStats, RequestOutput, StepReport
from noria.errors import EngineFailure, NoriaError
from noria.sequence import FinishReason
from noria.serving.reply import Reply
from noria.serving.triton_io import cancelled_response, error_response, response_for

log = logging.getLogger(__name__)

# A question to Triton whether a client has gone costs about 0.12 ms, so they are asked in turn, some at a time.
CANCEL_POLL_S = 0.02
MAX_CANCEL_POLLS = 32
STATS_S = 0.25


class Sink(Protocol):
    """Where the responses of one request go."""

    def send(self, response: Any, is_final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...


class DecoupledSink:
    """A response sender of Triton's decoupled mode.

    Lets go of the sender with the last response: as long as anyone holds one, Triton does not unload the model.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self.done = threading.Event()

    def send(self, response: Any, is_final: bool) -> None:
        if not is_final:
            self._sender.send(response)
            return
        sender, self._sender = self._sender, None
        try:
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self.done.set()

    def is_cancelled(self) -> bool:
        return self._sender is not None and bool(self._sender.is_cancelled())


class UnarySink:
    """Keeps the only response of a request until `execute` returns it."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.response: Any = None
        self.done = threading.Event()

    def send(self, response: Any, is_final: bool) -> None:
        if not is_final:
            raise ValueError("a model that is not decoupled answers once")
        self.response, self._request = response, None
        self.done.set()

    def is_cancelled(self) -> bool:
        return self._request is not None and bool(self._request.is_cancelled())


@dataclass(slots=True, eq=False)
class _OpenReply:
    reply: Reply
    sink: Sink
    is_closed: bool = False


class ResponseWriter:
    """Owns the senders. `register` a reply before its parts are submitted to the engine.

    abort: called with the ids of parts that nobody waits for any more.
    publish: called now and then with the engine's counts.
    is_unloading: asked while replies are open; once it says yes they end with an error.
    """

    def __init__(
        self,
        abort: Callable[[Sequence[int]], None],
        publish: Callable[[EngineStats], None],
        is_unloading: Callable[[], bool],
        decode_token: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._abort = abort
        self._publish = publish
        self._is_unloading = is_unloading
        self._decode_token = decode_token
        self._clock = clock
        self._inbox: queue.SimpleQueue[_OpenReply | StepReport | None] = queue.SimpleQueue()
        self._by_request_id: dict[int, _OpenReply] = {}
        self._open: deque[_OpenReply] = deque()
        self._unpublished: EngineStats | None = None
        self._next_poll = 0.0
        self._next_publication = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="noria-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, reply: Reply, sink: Sink) -> None:
        self._inbox.put(_OpenReply(reply, sink))

    def deliver(self, report: StepReport) -> None:
        self._inbox.put(report)

    def fail(self, request_ids: Sequence[int], error: NoriaError) -> None:
        """End parts that the engine will not hear of."""
        outputs = [
            RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error) for request_id in request_ids
        ]
        self._inbox.put(StepReport(tuple(outputs), stats=None))

    def stop(self, timeout_s: float) -> bool:
        """Send what has been delivered, end what is still open with an error. False if that took too long."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                touched = self._receive()
                for entry in touched:
                    self._send_news_or_fail(entry)
                if self._open and self._is_unloading():
                    self._close_all()
                self._poll_cancelled(touched)
                self._publish_stats(is_idle=not touched)
            except Exception:
                log.exception("the response writer failed in one turn")
        self._close_all()
        self._publish_stats(is_idle=True)

    def _receive(self) -> list[_OpenReply]:
        """Take in all that has piled up; the replies that it concerns, each once."""
        touched: dict[int, _OpenReply] = {}
        try:
            message = self._inbox.get(timeout=CANCEL_POLL_S if self._open or self._unpublished else None)
            while True:
                if message is None:
                    self._is_stopping = True
                elif isinstance(message, StepReport):
                    self._take(message, touched)
                else:
                    self._open.append(message)
                    self._by_request_id |= dict.fromkeys(message.reply.request_ids, message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return list(touched.values())

    def _take(self, report: StepReport, touched: dict[int, _OpenReply]) -> None:
        self._unpublished = report.stats or self._unpublished
        for output in report.outputs:
            entry = self._by_request_id.get(output.request_id)
            if entry is None:
                continue
            entry.reply.take(output)
            touched[id(entry)] = entry

    def _send_news_or_fail(self, entry: _OpenReply) -> None:
        """What goes wrong with one reply ends that one."""
        try:
            self._send_news(entry)
        except Exception as error:
            log.exception("a response could not be made")
            self._close(entry, error_response(EngineFailure(f"the response could not be made: {error}")))

    def _send_news(self, entry: _OpenReply) -> None:
        reply = entry.reply
        if entry.is_closed or not reply.has_news:
            return
        if reply.error is not None:
            self._close(entry, error_response(reply.error))
        elif reply.is_finished:
            self._close(entry, response_for(reply, reply.pop_chunk(), self._decode_token))
        elif not self._try_send(entry, response_for(reply, reply.pop_chunk(), self._decode_token), is_final=False):
            self._close(entry, error_response(EngineFailure("a response could not be sent")))

    def _close(self, entry: _OpenReply, response: Any) -> None:
        """The last response of a reply, and FINAL with it: the only place where a reply ends."""
        if entry.is_closed:
            return
        entry.is_closed = True
        live = entry.reply.live_request_ids
        for request_id in entry.reply.request_ids:
            self._by_request_id.pop(request_id, None)
        self._open.remove(entry)
        if live:
            self._abort(live)
        self._try_send(entry, response, is_final=True)

    def _close_all(self) -> None:
        for entry in list(self._open):
            self._close(entry, error_response(EngineFailure("the model is being unloaded")))

    def _try_send(self, entry: _OpenReply, response: Any, is_final: bool) -> bool:
        try:
            entry.sink.send(response, is_final)
            return True
        except Exception:
            # the client has gone, or Triton is shutting down: this reply is lost, the others are not
            log.warning("a response could not be sent", exc_info=True)
            return False

    def _poll_cancelled(self, touched: Sequence[_OpenReply]) -> None:
        """Ask for those that are being computed, and in turn for the others, some of which wait."""
        now = self._clock()
        if now < self._next_poll:
            return
        self._next_poll = now + CANCEL_POLL_S
        asked = dict.fromkeys(touched[:MAX_CANCEL_POLLS])
        for _ in range(min(len(self._open), MAX_CANCEL_POLLS)):
            asked[self._open[0]] = None
            self._open.rotate(-1)
        for entry in asked:
            if not entry.is_closed and entry.sink.is_cancelled():
                self._close(entry, cancelled_response())

    def _publish_stats(self, is_idle: bool) -> None:
        now = self._clock()
        if self._unpublished is None or (now < self._next_publication and not is_idle):
            return
        self._next_publication = now + STATS_S
        stats, self._unpublished = self._unpublished, None
        self._publish(stats)


def refuse(sink: Sink, error: NoriaError) -> None:
    """Answer a request that never reached the engine."""
    try:
        sink.send(error_response(error), is_final=True)
    except Exception:
        log.warning("a refusal could not be sent", exc_info=True)
