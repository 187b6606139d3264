"""Outputs of a gRPC response are read as tritonclient reads them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from noria_client.errors import ServerError
from noria_client.grpc_transport import _StreamReader

TEXTS = ["", "a", "größer 🙂\n", "x" * 70_000, "\0"]


def response_of(**outputs: np.ndarray) -> service_pb2.ModelStreamInferResponse:
    message = service_pb2.ModelStreamInferResponse()
    for name, values in outputs.items():
        is_text = values.dtype == np.object_
        datatype = "BYTES" if is_text else np_to_triton_dtype(values.dtype)
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=values.shape)
        raw = serialize_byte_tensor(values).item() if is_text and values.size else values.tobytes()
        message.infer_response.raw_output_contents.append(raw)
    return message


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1)])
def test_values_are_those_that_tritonclient_reads(shape):
    outputs = {
        "text_output": np.array([text.encode() for text in TEXTS], np.object_).reshape(shape),
        "cumulative_logprob": np.array([-0.0, -1.5, -np.inf, np.nan, 1e-30], np.float32).reshape(shape),
        "num_input_tokens": np.array([0, 1, 2**31, 2**32 - 1, 7], np.uint32).reshape(shape),
        "nothing": np.array([], np.object_),
    }
    message = response_of(**outputs)
    found = _StreamReader().read(message)
    theirs = InferResult(message.infer_response)
    assert found is not None
    assert found["text_output"] == TEXTS
    for name in outputs:
        expected = [value.decode() if isinstance(value, bytes) else value for value in theirs.as_numpy(name).flat]
        np.testing.assert_array_equal(np.array(found[name]), np.array(expected))


@pytest.mark.parametrize(
    "name", ["BOOL", "FP16", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT64"]
)
def test_outputs_of_other_types_are_read_too(name):
    """Which a model may send beside those of the contract."""
    values = np.array([0, 1, 100], triton_to_np_dtype(name))
    found = _StreamReader().read(response_of(text_output=np.array([b"a"], np.object_), other=values))
    assert found == {"text_output": ["a"], "other": values.tolist()}


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "words"),
    [
        ("BYTES", [1], struct.pack("<I", 100) + b"hello", "a string of 100 bytes, of which 5 came"),
        ("BYTES", [1], b"\xff\xff\xff\xffab", "a string of 4294967295 bytes, of which 2 came"),
        ("BYTES", [1], b"\5\0", "cannot be read"),
        ("BYTES", [1], struct.pack("<I", 1) + b"a" + b"xyz", "cannot be read"),
        ("BYTES", [2], struct.pack("<I", 1) + b"a", "has 1 values, not 2"),
        ("BYTES", [1], b"", "has 0 values, not 1"),
        ("BYTES", [1], struct.pack("<I", 2) + b"\xff\xfe", "cannot be read"),
        ("UINT32", [1], bytes(8), "has 2 values, not 1"),
        ("UINT32", [1], b"", "has 0 values, not 1"),
        ("UINT32", [1], bytes(3), "cannot be read"),
        ("BF16", [1], bytes(2), "cannot be read: 'BF16'"),
    ],
)
def test_what_is_not_as_the_protocol_has_it_is_an_error_of_the_server(datatype, shape, raw, words):
    """Told by name; a cut text must not pass for an answer."""
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="text_output", datatype=datatype, shape=shape)
    message.infer_response.raw_output_contents.append(raw)
    with pytest.raises(ServerError, match=f"text_output.*{words}"):
        _StreamReader().read(message)


def test_outputs_that_are_not_raw_are_refused():
    message = response_of(text_output=np.array([b"a"], np.object_))
    del message.infer_response.raw_output_contents[:]
    with pytest.raises(ServerError, match="not raw"):
        _StreamReader().read(message)
