"""The one thread that talks to clients: sends what has been generated, notices who has gone, ends every reply once.

When it falls behind the engine, it merges the chunks that have piled up for a reply into one response. A response that
Triton does not take waits, and more text with it; `held_replies` bounds that, and the others' are sent meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noria.engine.outputs import RequestOutput, StepReport
from noria.errors import EngineFailure, NoriaError, Overloaded
from noria.sequence import FinishReason
from noria.serving.held_replies import HeldReplies
from noria.serving.reply import Reply
from noria.serving.sinks import Sink, SinkFull
from noria.serving.triton_io import cancelled_response, error_response, response_for

log = logging.getLogger(__name__)

# A question to Triton whether a client has gone costs about 0.12 ms, so they are asked in turn, some at a time: 16 that
# are computed take 4 % of a core.
CANCEL_POLL_S = 0.05
MAX_CANCEL_POLLS = 32
_UNDELIVERED = (
    "the answer was not taken for {:g} s: the client reads too slowly, or the server has no shared memory left for "
    "responses (in Docker, --shm-size)"
)


@dataclass(slots=True, eq=False)
class _OpenReply:
    """refused: the arguments of a `send` that is to be made again. is_ended: its last response is known."""

    reply: Reply
    sink: Sink
    refused: tuple[Any, int, bool] | None = None
    is_ended: bool = False
    is_closed: bool = False


class ResponseWriter:
    """Owns the senders. `register` a reply before its parts are submitted to the engine.

    abort: called with the ids of parts that nobody waits for any more.
    held: keeps account of the replies that Triton does not take.
    stream_interval: new tokens in a streamed response.
    is_unloading: asked while replies are open; once it says yes they end with an error.
    """

    def __init__(
        self,
        abort: Callable[[Sequence[int]], None],
        held: HeldReplies,
        stream_interval: int,
        is_unloading: Callable[[], bool],
        decode_token: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._abort = abort
        self._held = held
        self._stream_interval = stream_interval
        self._is_unloading = is_unloading
        self._decode_token = decode_token
        self._clock = clock
        self._inbox: queue.SimpleQueue[_OpenReply | StepReport | None] = queue.SimpleQueue()
        self._by_request_id: dict[int, _OpenReply] = {}
        self._open: deque[_OpenReply] = deque()
        self._next_poll = 0.0
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
                    # an error is small, and does not wait behind what was refused
                    if entry.reply in self._held and entry.reply.error is None:
                        self._held.check_bound(entry.reply, self._clock())
                    else:
                        self._send_news_or_fail(entry)
                if len(self._held):
                    self._offer_again()
                if self._open and self._is_unloading():
                    self._close_all()
                self._poll_cancelled(touched)
            except Exception:
                log.exception("the response writer failed in one turn")
        self._close_all()

    def _receive(self) -> list[_OpenReply]:
        """Take in all that has piled up; the replies that it concerns, each once."""
        touched: dict[int, _OpenReply] = {}
        try:
            message = self._inbox.get(timeout=CANCEL_POLL_S if self._open else None)
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
            self._end(entry, error_response(EngineFailure(f"the response could not be made: {error}")))

    def _send_news(self, entry: _OpenReply) -> None:
        reply = entry.reply
        if entry.is_ended or not reply.has_news(self._stream_interval):
            return
        if reply.error is not None:
            self._end_after_text(entry, reply.error)
            return
        response, num_bytes = self._next_response(reply)
        if reply.is_finished:
            self._end(entry, response, num_bytes)
        else:
            self._send(entry, response, num_bytes, is_final=False)

    def _next_response(self, reply: Reply) -> tuple[Any, int]:
        """With all that has come and was not sent; and its bytes, about."""
        num_bytes = reply.num_waiting_bytes
        return response_for(reply, reply.pop_chunk(), self._decode_token), num_bytes

    def _end(self, entry: _OpenReply, response: Any, num_bytes: int = 0) -> None:
        """Nothing but `response` will be sent any more, and FINAL with it. The only place where a reply ends."""
        if entry.is_closed:
            return
        if not entry.is_ended:
            entry.is_ended = True
            for request_id in entry.reply.request_ids:
                self._by_request_id.pop(request_id, None)
            live = entry.reply.live_request_ids
            if live:
                self._abort(live)
        self._send(entry, response, num_bytes, is_final=True)

    def _send(self, entry: _OpenReply, response: Any, num_bytes: int, is_final: bool) -> None:
        try:
            entry.sink.send(response, num_bytes, is_final)
        except SinkFull:
            entry.refused = response, num_bytes, is_final
            self._held.hold(entry.reply, num_bytes, self._clock())
            return
        except Exception:
            # the client has gone, or Triton is shutting down: this reply is lost, the others are not
            log.warning("a response could not be sent", exc_info=True)
            if not is_final:
                self._end(entry, error_response(EngineFailure("a response could not be sent")))
                return
        entry.refused = None
        self._held.release(entry.reply)
        if is_final:
            entry.is_closed = True
            self._open.remove(entry)

    def _end_after_text(self, entry: _OpenReply, error: NoriaError) -> None:
        """What a stream has and was not due yet goes ahead of the error; what Triton has refused does not."""
        if entry.reply.has_text and entry.refused is None and not entry.is_ended:
            try:
                self._send(entry, *self._next_response(entry.reply), is_final=False)
            except Exception:
                # the end is owed whatever became of the text
                log.exception("a response could not be made")
        self._end(entry, error_response(error))

    def _close_all(self) -> None:
        for entry in list(self._open):
            self._end_after_text(entry, EngineFailure("the model is being unloaded"))

    def _offer_again(self) -> None:
        """To Triton, what it has refused, and then what has come since; what has waited too long is given up."""
        now = self._clock()
        for entry in [entry for entry in self._open if entry.refused is not None]:
            if self._held.is_overdue(entry.reply, now):
                self._end(entry, error_response(Overloaded(_UNDELIVERED.format(self._held.slow_reader_timeout_s))))
            elif entry.refused is not None and self._held.is_due(entry.reply, now):
                self._send(entry, *entry.refused)
                if entry.refused is None:
                    self._send_news_or_fail(entry)

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
                self._end(entry, cancelled_response())
