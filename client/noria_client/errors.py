"""What a server answered instead of text, under one name and one set of codes for gRPC and HTTP.

Knows the two protocols' status numbers and nothing of requests or connections.
"""

from __future__ import annotations

import grpc  # type: ignore[import-untyped]

UNKNOWN = "UNKNOWN"
UNAVAILABLE = "UNAVAILABLE"
INTERNAL = "INTERNAL"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"

_CODE_BY_GRPC_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARG",
    grpc.StatusCode.NOT_FOUND: "NOT_FOUND",
    grpc.StatusCode.UNAVAILABLE: UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
    grpc.StatusCode.ALREADY_EXISTS: "ALREADY_EXISTS",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.INTERNAL: INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED: DEADLINE_EXCEEDED,
}
# Without 400: tritonserver 2.51 gives it to every error of a model that answers through `generate`.
_CODE_BY_HTTP_STATUS = {
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    499: "CANCELLED",
    500: INTERNAL,
    501: "UNSUPPORTED",
    503: UNAVAILABLE,
}


class ServerError(Exception):
    """A request failed on the server, on the way to it, or by the client's own deadline.

    code: one of Triton's (INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL, UNSUPPORTED, NOT_FOUND, ALREADY_EXISTS),
    UNAVAILABLE too when the server cannot be reached, DEADLINE_EXCEEDED when the client gave up waiting, or UNKNOWN
    where the protocol carries no code: on gRPC streams unless asked for, and for a model's own errors over HTTP.
    """

    def __init__(self, message: str, code: str = UNKNOWN) -> None:
        super().__init__(f"{code}: {message}")
        self.message = message
        self.code = code


def from_grpc(error: grpc.RpcError) -> ServerError:
    return ServerError(error.details() or "no details", _CODE_BY_GRPC_STATUS.get(error.code(), UNKNOWN))


def from_http(status: int, message: str) -> ServerError:
    return ServerError(message, _CODE_BY_HTTP_STATUS.get(status, UNKNOWN))
