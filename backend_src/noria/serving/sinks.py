"""Where the responses of one client request go, and the one sign that Triton takes no more of them.

What a model sees of a client that does not read, measured on tritonserver 2.51: nothing. `send` hands a response to the
server's front end and returns (0.1 to 0.3 ms for 1 kB); with 300 MB unread over gRPC it took 1.6 ms a MB and at most
21 ms, over HTTP 13 ms a MB and at most 160; `is_cancelled` stayed false, and a neighbour's five responses came within
7 and 46 ms. The server keeps them all: over gRPC until the request has ended, read or not (20,000 responses of 1 kB
took 40 MiB in either case), over HTTP until they are read. So a slow reader delays nobody, and what it can make the
server hold is bounded by max_tokens: there is at most one response a token, of about 1 kB beside its text, and 80 bytes
for each log-probability that it asked for.

What does refuse a response is shared memory, through which it goes to the server, when /dev/shm is full: `send` raises
within 15 ms. The same sender takes the next attempt once there is room. But a response that was refused together with
FINAL has closed its sender, and its client waits for ever.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from noria.errors import NoriaError
from noria.serving.triton_io import error_response

log = logging.getLogger(__name__)

# A last response that is larger goes ahead of FINAL. The stub has 1 MiB of shared memory from the start, and this
# comfortably fits into it.
MAX_BYTES_WITH_FINAL = 2**16
_FULL_WORDS = "shared memory pool"


class SinkFull(Exception):
    """The response was not taken and may be offered again later."""


class Sink(Protocol):
    """Where the responses of one request go."""

    def send(self, response: Any, num_bytes: int, is_final: bool) -> None:
        """num_bytes: of the outputs, about. Raises SinkFull, or anything else when the client cannot be reached."""

    def is_cancelled(self) -> bool: ...


class DecoupledSink:
    """A response sender of Triton's decoupled mode.

    Lets go of the sender with the last response: as long as anyone holds one, Triton does not unload the model.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self.done = threading.Event()

    def send(self, response: Any, num_bytes: int, is_final: bool) -> None:
        if is_final and num_bytes <= MAX_BYTES_WITH_FINAL:
            self._finish(response)
            return
        try:
            self._sender.send(response)
        except Exception as error:
            if _FULL_WORDS in str(error):
                raise SinkFull(str(error)) from error
            if is_final:
                self._finish()
            raise
        if is_final:
            self._finish()

    def is_cancelled(self) -> bool:
        return self._sender is not None and bool(self._sender.is_cancelled())

    def _finish(self, *response: Any) -> None:
        sender, self._sender = self._sender, None
        try:
            sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self.done.set()


class UnarySink:
    """Keeps the only response of a request until `execute` returns it."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.response: Any = None
        self.done = threading.Event()

    def send(self, response: Any, num_bytes: int, is_final: bool) -> None:
        if not is_final:
            raise ValueError("a model that is not decoupled answers once")
        self.response, self._request = response, None
        self.done.set()

    def is_cancelled(self) -> bool:
        return self._request is not None and bool(self._request.is_cancelled())


def refuse(sink: Sink, error: NoriaError) -> None:
    """Answer a request that never reached the engine."""
    try:
        sink.send(error_response(error), num_bytes=0, is_final=True)
    except Exception:
        log.warning("a refusal could not be sent", exc_info=True)
