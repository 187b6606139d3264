"""The text contract over HTTP: `generate_stream` (server-sent events) for streams, `generate` for whole answers.

Blocking calls use http.client, a connection per request, because closing the connection is how a request is cancelled;
asynchronous ones use aiohttp. These endpoints shape the tensors themselves.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from typing import Any
from urllib.parse import quote

import aiohttp

from noria_client import errors
from noria_client.errors import ServerError
from noria_client.generation import Outputs
from noria_client.text_request import TRAITS_TIMEOUT_S, ModelTraits, TextRequest

_EVENT_PREFIX = "data:"
# keys of a reply that are not outputs
_ENVELOPE = ("model_name", "model_version", "id", "parameters")


class HttpTransport:
    """Blocking calls. The model's traits are asked for once."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url.removeprefix("http://").rstrip("/")
        self._model = model
        self._traits: ModelTraits | None = None

    def traits(self) -> ModelTraits:
        if self._traits is None:
            connection = http.client.HTTPConnection(self._url, timeout=TRAITS_TIMEOUT_S)
            try:
                connection.request("GET", _path(self._model, "config"))
                response = connection.getresponse()
                self._traits = _traits(_decode(response.status, response.read().decode()))
            except (OSError, http.client.HTTPException) as error:
                raise _unreachable(self._url, error) from None
            finally:
                connection.close()
        return self._traits

    def responses(self, request: TextRequest) -> Generator[Outputs, None, None]:
        """The responses to one request; closing the generator cancels the request on the server."""
        is_decoupled = self.traits().is_decoupled
        connection = http.client.HTTPConnection(self._url, timeout=request.client_timeout_s)
        deadline = None if request.client_timeout_s is None else time.monotonic() + request.client_timeout_s
        try:
            connection.request("POST", _path(self._model, _endpoint(is_decoupled)), to_body(request), _HEADERS)
            response = connection.getresponse()
            if is_decoupled and response.status == 200:
                for event in events(_lines(response, deadline)):
                    yield _outputs(_decode(response.status, event))
            else:
                yield _outputs(_decode(response.status, response.read().decode()))
        except TimeoutError:
            raise _too_late(request) from None
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._url, error) from None
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing outlives a request."""


class AsyncHttpTransport:
    """The same over asyncio; to be made and used within one running event loop."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url.removeprefix("http://").rstrip("/")
        self._model = model
        # as many connections as requests: a limit would queue requests here, where no deadline or metric sees them
        self._session = aiohttp.ClientSession(
            base_url=f"http://{self._url}", connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
        )
        self._traits: ModelTraits | None = None

    async def traits(self) -> ModelTraits:
        if self._traits is None:
            try:
                timeout = aiohttp.ClientTimeout(total=TRAITS_TIMEOUT_S)
                async with self._session.get(_path(self._model, "config"), timeout=timeout) as response:
                    self._traits = _traits(_decode(response.status, await response.text()))
            except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError) as error:
                raise _unreachable(self._url, error) from None
        return self._traits

    async def responses(self, request: TextRequest) -> AsyncGenerator[Outputs, None]:
        """The responses to one request; closing the generator cancels the request on the server."""
        timeout = aiohttp.ClientTimeout(total=request.client_timeout_s)
        is_decoupled = (await self.traits()).is_decoupled
        path = _path(self._model, _endpoint(is_decoupled))
        try:
            async with self._session.post(path, data=to_body(request), headers=_HEADERS, timeout=timeout) as response:
                if is_decoupled and response.status == 200:
                    async for line in response.content:
                        for event in events([line]):
                            yield _outputs(_decode(response.status, event))
                else:
                    yield _outputs(_decode(response.status, await response.text()))
        # which is not the built-in TimeoutError before Python 3.11
        except asyncio.TimeoutError:
            raise _too_late(request) from None
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from None

    async def close(self) -> None:
        await self._session.close()


_HEADERS = {"Content-Type": "application/json"}


def to_body(request: TextRequest) -> bytes:
    """The request as JSON. Triton hands `timeout` (microseconds) and `priority` to the model as parameters."""
    body: dict[str, Any] = dict(request.inputs())
    if request.timeout_us is not None:
        body["timeout"] = request.timeout_us
    if request.priority:
        body["priority"] = request.priority
    return json.dumps(body).encode()


def events(lines: Iterable[bytes]) -> Generator[str, None, None]:
    """The data of server-sent events that have one line of data each, as Triton writes them."""
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if text.startswith(_EVENT_PREFIX):
            yield text.removeprefix(_EVENT_PREFIX).strip()


def _lines(response: http.client.HTTPResponse, deadline: float | None) -> Generator[bytes, None, None]:
    """The socket's own timeout is per read; the deadline bounds a stream that never pauses for so long."""
    for line in response:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        yield line


def _endpoint(is_decoupled: bool) -> str:
    """Also for an answer that comes whole: of a client that leaves `generate` tritonserver tells the model nothing."""
    return "generate_stream" if is_decoupled else "generate"


def _path(model: str, endpoint: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{endpoint}"


def _decode(status: int, text: str) -> dict[str, Any]:
    """The JSON object of a reply or an event. Raises ServerError if it is an error or no object."""
    # an error that is a stream's first response comes as an event, but with an error's status
    text = text.strip().removeprefix(_EVENT_PREFIX)
    try:
        reply = json.loads(text)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise errors.from_http(status, f"HTTP {status} with a body that is not a JSON object: {text[:200]!r}")
    if "error" in reply:
        raise errors.from_http(status, str(reply["error"]))
    if status != 200:
        raise errors.from_http(status, f"HTTP {status}")
    return reply


def _traits(config: dict[str, Any]) -> ModelTraits:
    policy = config.get("model_transaction_policy", {})
    return ModelTraits(config.get("max_batch_size", 0), policy.get("decoupled", False))


def _outputs(reply: dict[str, Any]) -> Outputs:
    """Triton writes a tensor of one element as a bare value."""
    values = {name: value for name, value in reply.items() if name not in _ENVELOPE}
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def _too_late(request: TextRequest) -> ServerError:
    return ServerError(f"no complete answer in {request.client_timeout_s} s", errors.DEADLINE_EXCEEDED)


def _unreachable(url: str, error: Exception) -> ServerError:
    return ServerError(f"{url}: {error or type(error).__name__}", errors.UNAVAILABLE)
