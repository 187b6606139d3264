"""One real tritonserver with the echo models for all tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.echo_server import EchoServer, running_echo_server


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with running_echo_server(tmp_path_factory.mktemp("echo")) as server:
        yield server
