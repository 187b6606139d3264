"""The two clients, blocking and asynchronous, over gRPC or HTTP.

They speak the text contract that Triton's LLM backends share, so they know models by name and shape only: no
tokenizer, no weights, no batching mode.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any

from noria_client.generation import Delta, DeltaReader, Generation, collect
from noria_client.grpc_transport import AsyncGrpcTransport, GrpcTransport
from noria_client.http_transport import AsyncHttpTransport, HttpTransport
from noria_client.text_request import ModelTraits, Prompt, build_request

DEFAULT_MODEL = "llm"
PROTOCOLS = ("grpc", "http")


class Client:
    """Blocking calls to one model of one server.

    url: host:port of the protocol's endpoint. The model's shape is asked for once: after it was loaded with another
    config, make a new client. Threads may share a client.
    has_error_codes: ask for codes with the errors of gRPC streams; without them a stream's error has the code UNKNOWN.
    Not for a server that refuses many requests: tritonserver 2.51 died (SIGSEGV) after 50 to 300 streams refused so,
    and with a model that sends an error and its FINAL flag apart, which Noria does not, at the first.
    """

    def __init__(
        self, url: str, protocol: str = "grpc", model: str = DEFAULT_MODEL, has_error_codes: bool = False
    ) -> None:
        self._transport: GrpcTransport | HttpTransport
        if _is_grpc(protocol):
            self._transport = GrpcTransport(url, model, has_error_codes)
        else:
            self._transport = HttpTransport(url, model)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, priority: int = 0, **sampling: Any
    ) -> Generation:
        """The whole answer. See `stream` for the arguments and errors."""
        request = build_request(prompt, False, timeout_s, priority, sampling)
        reader = DeltaReader()
        with closing(self._transport.responses(request)) as responses:
            deltas = [delta for outputs in responses for delta in reader.read(outputs)]
        reader.check_complete()
        return collect(deltas)

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, priority: int = 0, **sampling: Any
    ) -> Generator[Delta, None, None]:
        """The answer piece by piece; all at once from a model that is not decoupled.

        The request is sent when the first piece is asked for. Closing the generator, or an exception such as
        KeyboardInterrupt while it waits, cancels the request on the server.

        prompt: a text, or a list of messages for the model's chat template.
        timeout_s: the server's deadline for the request; the client itself gives up a second later.
        priority: in Triton's queue and in the model's, 1 is the highest and 0 the model's default.
        sampling: the contract's sampling parameters (max_tokens, temperature, stop, n, ...); None leaves one out.

        Raises ServerError if the server refuses or fails the request, cannot be reached, or is too late.
        """
        is_streamed = self._transport.traits().is_decoupled
        request = build_request(prompt, is_streamed, timeout_s, priority, sampling)
        reader = DeltaReader()
        with closing(self._transport.responses(request)) as responses:
            for outputs in responses:
                yield from reader.read(outputs)
        reader.check_complete()

    def traits(self) -> ModelTraits:
        """The model's shape. Raises ServerError if the server or the model is not there."""
        return self._transport.traits()

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same calls for asyncio; to be made and used within one running event loop.

    A task that is cancelled while it awaits an answer cancels the request on the server. Wrap `stream` in
    `contextlib.aclosing` where the loop over it may end early.
    """

    def __init__(
        self, url: str, protocol: str = "grpc", model: str = DEFAULT_MODEL, has_error_codes: bool = False
    ) -> None:
        self._transport: AsyncGrpcTransport | AsyncHttpTransport
        if _is_grpc(protocol):
            self._transport = AsyncGrpcTransport(url, model, has_error_codes)
        else:
            self._transport = AsyncHttpTransport(url, model)

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, priority: int = 0, **sampling: Any
    ) -> Generation:
        """See `Client.generate`."""
        request = build_request(prompt, False, timeout_s, priority, sampling)
        reader = DeltaReader()
        async with aclosing(self._transport.responses(request)) as responses:
            deltas = [delta async for outputs in responses for delta in reader.read(outputs)]
        reader.check_complete()
        return collect(deltas)

    async def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, priority: int = 0, **sampling: Any
    ) -> AsyncGenerator[Delta, None]:
        """See `Client.stream`."""
        is_streamed = (await self._transport.traits()).is_decoupled
        request = build_request(prompt, is_streamed, timeout_s, priority, sampling)
        reader = DeltaReader()
        async with aclosing(self._transport.responses(request)) as responses:
            async for outputs in responses:
                for delta in reader.read(outputs):
                    yield delta
        reader.check_complete()

    async def traits(self) -> ModelTraits:
        """See `Client.traits`."""
        return await self._transport.traits()

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_grpc(protocol: str) -> bool:
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, not {protocol!r}")
    return protocol == "grpc"
