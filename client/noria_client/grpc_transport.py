"""The text contract over gRPC: `ModelStreamInfer` for decoupled models, `ModelInfer` for the others.

Each request is its own stream, so that each can be cancelled alone, while all share one channel. tritonclient's
messages and stubs are used without its client classes: the synchronous one has a single stream per client, the
asynchronous one cannot ask for empty final responses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from noria_client import errors
from noria_client.errors import ServerError
from noria_client.generation import Outputs
from noria_client.text_request import TRAITS_TIMEOUT_S, ModelTraits, TextRequest

# Each client has a connection of its own: by default, all channels of a process to one address share one.
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]

# the protocol's numbers as `struct` names them, all little-endian
_NUMBERS = {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"}
_NUMBERS |= {"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"}
_NUMBERS |= {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"}
_LENGTH = struct.Struct("<I")

# Asks for a stream's errors as gRPC statuses, with a code, instead of texts alone; servers before 24.08 ignore it.
_ERROR_CODES = (("triton_grpc_error", "true"),)


class GrpcTransport:
    """Blocking calls over one channel. The model's traits are asked for once."""

    def __init__(self, url: str, model: str, has_error_codes: bool = False) -> None:
        self._model = model
        self._metadata = _ERROR_CODES if has_error_codes else ()
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._traits: ModelTraits | None = None

    def traits(self) -> ModelTraits:
        if self._traits is None:
            try:
                self._traits = _traits(self._stub.ModelConfig(_config_request(self._model), timeout=TRAITS_TIMEOUT_S))
            except grpc.RpcError as error:
                raise errors.from_grpc(error) from None
        return self._traits

    def responses(self, request: TextRequest) -> Generator[Outputs, None, None]:
        """The responses to one request; closing the generator cancels the request on the server."""
        traits = self.traits()
        message = to_message(request, self._model, traits)
        try:
            if traits.is_decoupled:
                yield from self._stream(message, request)
            else:
                yield _outputs(self._stub.ModelInfer(message, timeout=request.client_timeout_s))
        except grpc.RpcError as error:
            raise errors.from_grpc(error) from None

    def _stream(self, message: Any, request: TextRequest) -> Generator[Outputs, None, None]:
        call = self._stub.ModelStreamInfer(iter([message]), timeout=request.client_timeout_s, metadata=self._metadata)
        reader = _StreamReader()
        try:
            for response in call:
                outputs = reader.read(response)
                if outputs is not None:
                    yield outputs
            reader.check_end()
        finally:
            # does nothing to a call that is over
            call.cancel()

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """The same over asyncio; to be made and used within one running event loop."""

    def __init__(self, url: str, model: str, has_error_codes: bool = False) -> None:
        self._model = model
        self._metadata = _ERROR_CODES if has_error_codes else ()
        self._channel = grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._traits: ModelTraits | None = None

    async def traits(self) -> ModelTraits:
        if self._traits is None:
            try:
                self._traits = _traits(
                    await self._stub.ModelConfig(_config_request(self._model), timeout=TRAITS_TIMEOUT_S)
                )
            except grpc.RpcError as error:
                raise errors.from_grpc(error) from None
        return self._traits

    async def responses(self, request: TextRequest) -> AsyncGenerator[Outputs, None]:
        """The responses to one request; closing the generator cancels the request on the server."""
        traits = await self.traits()
        message = to_message(request, self._model, traits)
        try:
            if not traits.is_decoupled:
                yield _outputs(await self._stub.ModelInfer(message, timeout=request.client_timeout_s))
                return
            call = self._stub.ModelStreamInfer(
                _once(message), timeout=request.client_timeout_s, metadata=self._metadata
            )
            reader = _StreamReader()
            try:
                async for response in call:
                    outputs = reader.read(response)
                    if outputs is not None:
                        yield outputs
                reader.check_end()
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise errors.from_grpc(error) from None

    async def close(self) -> None:
        await self._channel.close()


class _StreamReader:
    """Reads the messages of one request's stream and holds the server to exactly one FINAL, at the end.

    The loop over the stream goes on to its end even after an error: tritonserver 2.51 sometimes never releases a
    request whose stream is cancelled just as its error was sent, and then cannot unload the model.
    """

    def __init__(self) -> None:
        self._has_final = False
        self._error: ServerError | None = None

    def read(self, message: Any) -> Outputs | None:
        """The outputs of a message; None if it carries an error, or the FINAL flag alone."""
        if message.error_message and self._error is None:
            self._error = ServerError(message.error_message)
        response = message.infer_response
        if self._error is not None:
            return None
        if self._has_final:
            self._error = ServerError("a response came after the final one", errors.INTERNAL)
            return None
        self._has_final = response.parameters["triton_final_response"].bool_param
        return _outputs(response) if response.outputs else None

    def check_end(self) -> None:
        """Raises the stream's error, or one if it ended without FINAL."""
        if self._error is not None:
            raise self._error
        if not self._has_final:
            raise ServerError("the stream ended without a final response", errors.INTERNAL)


def to_message(request: TextRequest, model: str, traits: ModelTraits) -> Any:
    """The request as a ModelInferRequest."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in request.inputs().items():
        if isinstance(value, bool):
            tensor = message.inputs.add(name=name, datatype="BOOL", shape=traits.tensor_shape)
            tensor.contents.bool_contents.append(value)
        else:
            tensor = message.inputs.add(name=name, datatype="BYTES", shape=traits.tensor_shape)
            tensor.contents.bytes_contents.append(value.encode())
    if request.timeout_us is not None:
        message.parameters["timeout"].int64_param = request.timeout_us
    if request.priority:
        message.parameters["priority"].uint64_param = request.priority
    if traits.is_decoupled:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def _config_request(model: str) -> Any:
    return service_pb2.ModelConfigRequest(name=model)


def _traits(response: Any) -> ModelTraits:
    config = response.config
    return ModelTraits(config.max_batch_size, config.model_transaction_policy.decoupled)


def _outputs(response: Any) -> Outputs:
    """The values of each output. By way of InferResult and numpy it takes three times as long, for each token that
    a client receives."""
    if len(response.raw_output_contents) != len(response.outputs):
        raise ServerError("a response whose outputs are not raw: Triton sends them so", errors.INTERNAL)
    return {
        output.name: _values(output, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _values(output: Any, raw: bytes) -> list[Any]:
    """In the order of the protocol: strings each behind its length, or numbers. Raises ServerError for all else."""
    count = math.prod(output.shape)
    try:
        values = _strings(raw) if output.datatype == "BYTES" else _numbers(output.datatype, raw)
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise ServerError(
            f"the output {output.name} ({output.datatype}) cannot be read: {error}", errors.INTERNAL
        ) from None
    if len(values) != count:
        raise ServerError(f"the output {output.name} has {len(values)} values, not {count}", errors.INTERNAL)
    return values


def _strings(raw: bytes) -> list[str]:
    values, place = [], 0
    while place < len(raw):
        begin = place + _LENGTH.size
        place = begin + _LENGTH.unpack_from(raw, place)[0]
        if place > len(raw):
            raise struct.error(f"a string of {place - begin} bytes, of which {len(raw) - begin} came")
        values.append(raw[begin:place].decode())
    return values


def _numbers(datatype: str, raw: bytes) -> list[Any]:
    return [value for (value,) in struct.iter_unpack("<" + _NUMBERS[datatype], raw)]


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
