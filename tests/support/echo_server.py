"""Starts a real tritonserver with the echo model in every shape that the client must know.

Knows where tritonserver lies in the nvidia-pytriton wheel; knows nothing of Noria's own model.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    wheel = _wheel_folder()
    backends = _link_backend(wheel, folder / "backends")
    ports = {kind: _free_port() for kind in ("http", "grpc", "metrics")}
    command = [str(wheel / "tritonserver/bin/tritonserver"), f"--model-repository={folder / 'models'}"]
    command += [f"--backend-directory={backends}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    for kind, port in ports.items():
        command += [f"--{kind}-port={port}", f"--{kind}-address=127.0.0.1"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(wheel.parent / "nvidia_pytriton.libs"),
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


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None, "the nvidia-pytriton wheel, which carries tritonserver, is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _link_backend(wheel: Path, folder: Path) -> Path:
    """The Python backend with the stub of this Python, as a backend directory."""
    python = folder / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (python / name).symlink_to(wheel / "tritonserver/backends/python" / name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = "triton_python_backend_stub"
    (python / stub).symlink_to(wheel / "tritonserver/python_backend_stubs" / version / stub)
    return folder


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], server: EchoServer, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"tritonserver ended early:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"tritonserver was not ready in {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
