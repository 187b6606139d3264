"""Real tritonservers with the real model, one for each config, started when first asked for, then kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions, default_repository

HOST = "127.0.0.1"
# room for the longest sequence of the model; several servers live side by side
KV_CACHE_GIB = 0.5
StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """A function from a config's name and overrides of engine.json to a ready server, one for the same words."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        running: dict[str, RunningServer] = {}

        def start(mode: str, **engine: object) -> RunningServer:
            key = f"{mode} {sorted(engine.items())}"
            if key not in running:
                http_port, grpc_port, metrics_port = free_ports(HOST, (0, 0, 0))
                options = ServerOptions(
                    default_repository(),
                    mode,
                    http_port=http_port,
                    grpc_port=grpc_port,
                    metrics_port=metrics_port,
                    engine={"kv_cache_gib": KV_CACHE_GIB} | engine,
                    extra_arguments=["--model-control-mode=explicit", "--load-model=llm"],
                )
                server = RunningServer(options, folder / f"{len(running)}.log")
                running[key] = stack.enter_context(server)
            return running[key]

        yield start


@pytest.fixture(params=["inflight", "static", "dynamic"])
def any_mode(request: pytest.FixtureRequest, start_server: StartServer) -> RunningServer:
    """A server in each of the three modes that stream. Static waits half a second for a full batch."""
    return start_server(request.param)
