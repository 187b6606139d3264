"""Requests to a Triton server through plain tritonclient, as any client would, and each response as it came."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

RESPONSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RawResponse:
    """outputs: flat lists by name, strings decoded. error: its message, and its code's name where Triton sends one."""

    outputs: dict[str, list[Any]]
    is_final: bool
    error: str | None = None
    code: str | None = None


class RawStream:
    """One gRPC stream with one request on it."""

    def __init__(
        self,
        url: str,
        inputs: Mapping[str, Any],
        model: str = "llm",
        timeout_us: int | None = None,
        priority: int = 0,
    ) -> None:
        """inputs: a value, or a list of values for several rows; bool, bytes and str as BOOL and BYTES.

        priority: Triton's, which its queue reads and the model never sees.
        """
        self._client = grpcclient.InferenceServerClient(url)
        max_batch_size = self._client.get_model_config(model).config.max_batch_size
        self._received: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._received.put((result, error)))
        self._client.async_stream_infer(
            model,
            [_input(name, value, is_batched=max_batch_size > 0) for name, value in inputs.items()],
            enable_empty_final_response=True,
            timeout=timeout_us,
            priority=priority,
        )

    def next(self, timeout_s: float = RESPONSE_TIMEOUT_S) -> RawResponse:
        result, error = self._received.get(timeout=timeout_s)
        if error is not None:
            return RawResponse({}, True, error.message(), error.status())
        response = result.get_response()
        outputs = {output.name: _values(result.as_numpy(output.name)) for output in response.outputs}
        return RawResponse(outputs, response.parameters["triton_final_response"].bool_param)

    def all(self) -> list[RawResponse]:
        """Every response up to the final one; then the stream is closed, and must have brought nothing after it."""
        responses = [self.next()]
        while not responses[-1].is_final:
            responses.append(self.next())
        self._client.stop_stream()
        assert self._received.empty(), "a response came after the final one"
        return responses

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def has_more(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not self._received.empty():
                return True
            time.sleep(0.01)
        return False


class RawInfer:
    """A plain infer under way, for a model that is not decoupled."""

    def __init__(self, url: str, inputs: Mapping[str, Any], model: str = "llm", timeout_us: int | None = None) -> None:
        client = grpcclient.InferenceServerClient(url)
        max_batch_size = client.get_model_config(model).config.max_batch_size
        tensors = [_input(name, value, is_batched=max_batch_size > 0) for name, value in inputs.items()]
        self._received: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._call = client.async_infer(
            model, tensors, lambda result, error: self._received.put((result, error)), timeout=timeout_us
        )

    def result(self) -> RawResponse:
        result, error = self._received.get(timeout=RESPONSE_TIMEOUT_S)
        if error is not None:
            return RawResponse({}, True, error.message(), error.status())
        outputs = {output.name: _values(result.as_numpy(output.name)) for output in result.get_response().outputs}
        return RawResponse(outputs, True)

    def cancel(self) -> None:
        self._call.cancel()


def text_inputs(text: Any, sampling: Mapping[str, Any] | bytes | None = None, **inputs: Any) -> dict[str, Any]:
    """The inputs of the text contract; sampling as an object, or as the bytes that stand for one."""
    values: dict[str, Any] = {"text_input": text} | inputs
    if sampling is not None:
        encoded = sampling if isinstance(sampling, bytes) else json.dumps(sampling).encode()
        values["sampling_parameters"] = [encoded] * len(text) if isinstance(text, list) else encoded
    return values


def _input(name: str, value: Any, is_batched: bool) -> Any:
    values = value if isinstance(value, list) else [value]
    kind = {bool: "BOOL", int: "INT32"}.get(type(values[0]), "BYTES")
    if kind == "BYTES":
        values = [item.encode() if isinstance(item, str) else item for item in values]
    array = np.array(values, dtype={"BOOL": bool, "INT32": np.int32}.get(kind, np.object_))
    array = array.reshape((len(values), 1) if is_batched else (len(values),))
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _values(array: np.ndarray) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
