"""Stands in for triton_python_backend_utils, which only the real server's stub has: what Noria uses, as it behaves.

It refuses what the real one refuses: a send after FINAL, a send of nothing that is not FINAL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._code = code

    def message(self) -> str:
        return str(self)

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError:
        assert self._error is not None
        return self._error

    def value(self, name: str) -> Any:
        """For assertions: the output as (nested) Python values, None when it is not there."""
        for tensor in self._tensors:
            if tensor.name() == name:
                return tensor.as_numpy().tolist()
        return None


class FakeSender:
    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.num_finals = 0
        self.cancelled = False
        self.is_broken = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.num_finals:
            raise TritonError("Unable to send response. Response sender has been closed.")
        if response is None and flags != TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            raise TritonError("Inference Response object must be provided unless the response is final")
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.num_finals += 1
        if self.is_broken:
            raise TritonError("broken")
        if response is not None:
            self.responses.append(response)

    def is_cancelled(self) -> bool:
        return self.cancelled


class FakeRequest:
    """A request as Triton hands it over; `inputs` by name, with the shape that the config gives them."""

    def __init__(
        self, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any] | None = None, timeout_us: int = 0
    ) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._parameters, self._timeout_us = dict(parameters or {}), timeout_us
        self.sender = FakeSender()
        self.cancelled = False

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def timeout(self) -> int:
        return self._timeout_us

    def get_response_sender(self) -> FakeSender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self.cancelled


class InferenceRequest:
    """A model's call to a model. The class attribute is what every such call is answered."""

    answer = "the input text_input is missing"

    def __init__(self, model_name: str, requested_output_names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        pass

    def exec(self) -> InferenceResponse:
        return InferenceResponse([], TritonError(self.answer))


class Metric:
    def __init__(self) -> None:
        self.total = 0.0

    def increment(self, value: float) -> None:
        assert value >= 0
        self.total += value

    def set(self, value: float) -> None:
        self.total = value

    def value(self) -> float:
        return self.total


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str]) -> Metric:
        return Metric()
