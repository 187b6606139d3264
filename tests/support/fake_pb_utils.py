"""Stands in for triton_python_backend_utils, which only the real server's stub has: what Noria uses, as it behaves.

It refuses what the real one refuses: a send after FINAL, a send of nothing that is not FINAL.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
Labels = frozenset[tuple[str, str]]


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


_COUNTER, _GAUGE, _HISTOGRAM = range(3)


class Metric:
    """One series. Like the real one it stays in the registry when its model is gone, and raises without its family."""

    def __init__(self, family: MetricFamily, buckets: Sequence[float] | None) -> None:
        self._family = weakref.ref(family)
        self._kind = family.kind
        self.buckets = buckets
        self.observed: list[float] = []
        self.num_calls = 0
        self.total = 0.0

    def increment(self, value: float) -> None:
        self._check(_COUNTER, _GAUGE)
        assert value >= 0
        self.total += value

    def set(self, value: float) -> None:
        self._check(_GAUGE)
        self.total = value

    def observe(self, value: float) -> None:
        self._check(_HISTOGRAM)
        self.observed.append(value)

    def value(self) -> float:
        return self.total

    def _check(self, *kinds: int) -> None:
        self.num_calls += 1
        if self._family() is None:
            raise TritonError("Invalid metric operation as the corresponding 'MetricFamily' has been deleted.")
        assert self._kind in kinds


class MetricFamily:
    """The registry is the whole server's: by name, and in it by labels."""

    COUNTER, GAUGE, HISTOGRAM = _COUNTER, _GAUGE, _HISTOGRAM
    registry: ClassVar[dict[str, tuple[int, str, dict[Labels, Metric]]]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        registered_kind, registered_description, _ = self.registry.setdefault(name, (kind, description, {}))
        if registered_kind != kind:
            raise TritonError(f"Metric family {name} is of another kind")
        assert registered_description == description, f"{name} has two descriptions"

    def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Metric:
        assert (buckets is not None) == (self.kind == _HISTOGRAM)
        series = self.registry[self.name][2]
        key = frozenset(labels.items())
        earlier = series.get(key)
        series[key] = metric = Metric(self, buckets)
        if earlier is not None:
            metric.total, metric.observed = earlier.total, earlier.observed
        return metric


def series(name: str, **labels: str) -> Metric:
    """For assertions: the only series of that name that has these labels, among others perhaps."""
    (metric,) = [metric for key, metric in MetricFamily.registry[name][2].items() if frozenset(labels.items()) <= key]
    return metric


def total(name: str, **labels: str) -> float:
    """For assertions: the sum over the series of that name that have these labels."""
    family = MetricFamily.registry[name][2]
    return sum(metric.total for key, metric in family.items() if frozenset(labels.items()) <= key)
