"""Starts a real tritonserver with the echo model in every shape that the client must know.

Knows nothing of Noria's own model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from noria.serving.machine import free_ports
from noria.serving.triton_install import find_triton

ECHO_FILES = Path(__file__).parent / "echo_repository"
# name: (max_batch_size, is decoupled)
VARIANTS = {
    "stream": (0, True),
    "stream_batched": (8, True),
    "whole": (0, False),
    "whole_batched": (8, False),
}
START_TIMEOUT_S = 30
EXIT_TIMEOUT_S = 10


@dataclass(frozen=True)
class EchoServer:
    """Addresses as host:port."""

    grpc: str
    http: str
    metrics: str

    def url(self, protocol: str) -> str:
        return {"grpc": self.grpc, "http": self.http}[protocol]


def build_repository(folder: Path) -> None:
    """One model folder per entry of VARIANTS."""
    common = (ECHO_FILES / "config.pbtxt").read_text()
    for name, (max_batch_size, is_decoupled) in VARIANTS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        shutil.copy(ECHO_FILES / "model.py", version)
        own = f'name: "{name}"\nmax_batch_size: {max_batch_size}\n'
        own += f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}\n"
        (folder / name / "config.pbtxt").write_text(own + common)


@contextmanager
def running_echo_server(folder: Path) -> Iterator[EchoServer]:
    """A server on free loopback ports, stopped at the end; `folder` takes its repository, backend and log."""
    build_repository(folder / "models")
    install = find_triton(folder)
    ports = dict(zip(("http", "grpc", "metrics"), free_ports("127.0.0.1", (0, 0, 0)), strict=True))
    command = [str(install.binary), f"--model-repository={folder / 'models'}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    if install.backend_directory is not None:
        command.append(f"--backend-directory={install.backend_directory}")
    for kind, port in ports.items():
        command += [f"--{kind}-port={port}", f"--{kind}-address=127.0.0.1"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, install.library_path)),
        # the stub is an isolated interpreter: it finds site-packages through the first python3 on PATH, not PYTHONPATH
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = EchoServer(**{kind: f"127.0.0.1:{port}" for kind, port in ports.items()})
        _wait_until_ready(process, server, log)
        yield server
    finally:
        _stop(process)
    # it does not end cleanly if a model could not be unloaded, which is how a request that was never released shows
    assert process.returncode == 0, f"tritonserver ended with {process.returncode}:\n{log.read_text()[-4000:]}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=2 * EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], server: EchoServer, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"tritonserver ended early:\n{log.read_text()[-4000:]}"
        try:
            for address in (f"{server.http}/v2/health/ready", f"{server.metrics}/metrics"):  # opened in this order
                urllib.request.urlopen(f"http://{address}", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"tritonserver was not ready in {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
