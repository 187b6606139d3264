"""Runs a tritonserver over the model repository: `noria serve`, and what tests and comparisons start."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from noria.config import default_cache_dir
from noria.config_sources import ENVIRONMENT_VARIABLE, decode_object, own_parameters
from noria.errors import ConfigError, EngineFailure
from noria.serving.machine import check_ports, check_shm
from noria.serving.triton_install import TritonInstall, find_triton

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 45.0
_OF_METRICS = ("--allow-metrics", "--metrics-port", "--metrics-address")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve and where. engine: overrides for engine.json. extra_arguments go to tritonserver as they are.

    server_id: what the server calls itself, by which it is told from another one on the same port.
    """

    repository: Path
    mode: str = "inflight"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    engine: Mapping[str, object] = field(default_factory=dict)
    extra_arguments: Sequence[str] = ()
    server_id: str = field(default_factory=lambda: f"noria-{uuid.uuid4().hex[:12]}")

    @property
    def has_metrics(self) -> bool:
        """False where extra_arguments decide about the metrics endpoint: it may never open, or be elsewhere."""
        return not any(argument.startswith(_OF_METRICS) for argument in self.extra_arguments)


def default_repository() -> Path:
    """The model repository beside this source tree. Raises ConfigError where there is none."""
    for parent in Path(__file__).resolve().parents:
        repository = parent / "model_repository"
        if (repository / "llm" / "config.pbtxt").is_file():
            return repository
    raise ConfigError("no model_repository was found beside this package; name one with --repository")


def check_mode(repository: Path, mode: str) -> None:
    """Raises ConfigError unless the repository has a config of that name."""
    if not (repository / "llm" / "config.pbtxt").is_file():
        raise ConfigError(f"--repository must be a model repository with the model llm, which {repository} is not")
    configs = sorted(path.stem for path in (repository / "llm" / "configs").glob("*.pbtxt"))
    if mode not in configs:
        raise ConfigError(f"mode must be one of {', '.join(configs)}, not {mode!r}")


def config_parameters(repository: Path, mode: str) -> dict[str, str]:
    """The engine's settings among the `parameters` of a mode's config. Raises ConfigError if it cannot be read."""
    parameters = read_model_config(repository, mode).get("parameters", {})
    return own_parameters({key: value["string_value"] for key, value in parameters.items()})


def read_model_config(repository: Path, mode: str) -> dict[str, Any]:
    """A mode's config as Triton's JSON has it. Raises ConfigError if it cannot be read."""
    from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
    from tritonclient.grpc import model_config_pb2

    path = repository / "llm" / "configs" / f"{mode}.pbtxt"
    try:
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return dict(json_format.MessageToDict(config, preserving_proto_field_name=True))


def server_command(options: ServerOptions, install: TritonInstall) -> list[str]:
    command = [
        str(install.binary),
        f"--model-repository={options.repository.resolve()}",
        f"--model-config-name={options.mode}",
        f"--id={options.server_id}",
        "--disable-auto-complete-config",
    ]
    for service, port in (("http", options.http_port), ("grpc", options.grpc_port), ("metrics", options.metrics_port)):
        command += [f"--{service}-address={options.host}", f"--{service}-port={port}"]
    if install.backend_directory is not None:
        command.append(f"--backend-directory={install.backend_directory}")
    return [*command, *options.extra_arguments]


def server_environment(options: ServerOptions, install: TritonInstall, base: Mapping[str, str]) -> dict[str, str]:
    """The environment that the server hands on to the stub: where its Python is, and how threads wait.

    The stub is an isolated interpreter: it ignores PYTHONPATH and takes the site-packages of the first python3 on PATH.
    A pool of compute threads that spins while it waits slows whoever shares the machine many times over, so threads
    sleep; the variables count only if they are set before torch is loaded. What the user has set is left alone.
    """
    environment = dict(base)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if install.library_path:
        libraries = [*map(str, install.library_path), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment[ENVIRONMENT_VARIABLE] = engine_environment(options.engine, base)
    return environment


def engine_environment(engine: Mapping[str, object], base: Mapping[str, str]) -> str:
    """The value of NORIA_ENGINE: what `base` has there, with `engine` over it. Raises ConfigError."""
    inherited = decode_object(ENVIRONMENT_VARIABLE, base.get(ENVIRONMENT_VARIABLE) or "{}")
    return json.dumps(inherited | dict(engine))


def prepare(options: ServerOptions) -> tuple[list[str], dict[str, str]]:
    """Check the machine and the options; the command and the environment that serve them. Raises ConfigError."""
    check_mode(options.repository, options.mode)
    ports = {"--http-port": options.http_port, "--grpc-port": options.grpc_port, "--metrics-port": options.metrics_port}
    check_ports(options.host, ports)
    check_shm()
    install = find_triton(default_cache_dir())
    return server_command(options, install), server_environment(options, install, os.environ)


def _end_with_parent() -> None:
    """Runs in the new process: SIGTERM is sent to it when ours is gone, even if that was killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class RunningServer:
    """A tritonserver of our own: started, waited for, stopped by its process id. Use as a context manager.

    log_path: where its output goes; None passes it on to our standard error. Quoted when it does not become ready.
    """

    def __init__(self, options: ServerOptions, log_path: Path | None = None) -> None:
        self.options = options
        self.log_path = log_path
        # of a server that has been stopped; below 0 the signal that ended it
        self.exit_code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._echo: threading.Thread | None = None
        self._last_lines: deque[bytes] = deque(maxlen=1000)

    @property
    def http_url(self) -> str:
        return f"{self.options.host}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self.options.host}:{self.options.grpc_port}"

    @property
    def metrics_address(self) -> str:
        return f"{self.options.host}:{self.options.metrics_port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EngineFailure("the server has not been started")
        return self._process.pid

    def __enter__(self) -> RunningServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        command, environment = prepare(self.options)
        with self.log_path.open("wb") if self.log_path else nullcontext(subprocess.PIPE) as output:
            # A session of its own, so that a Ctrl-C in the terminal reaches us first and we stop the server in order.
            # The stub has its working directory on sys.path; the repository's own holds no Python packages.
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.options.repository,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        if self._process.stdout is not None:
            self._echo = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
            self._echo.start()

    def _pass_on(self, output: IO[bytes]) -> None:
        for line in output:
            self._last_lines.append(line)
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()

    def wait(self) -> int:
        """Until the server ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def wait_until_ready(self) -> None:
        """Raises EngineFailure with the log's errors if the server ends, or is not ready in time."""
        assert self._process is not None
        start = time.monotonic()
        while time.monotonic() - start < READY_TIMEOUT_S:
            if self._process.poll() is not None:
                raise EngineFailure(f"tritonserver ended with code {self._process.returncode}:\n{self._log_excerpt()}")
            if self.is_ready():
                return
            time.sleep(0.1)
        raise EngineFailure(f"tritonserver was not ready within {READY_TIMEOUT_S:.0f} s:\n{self._log_excerpt()}")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of its session then, or when that takes too long.

        A stub can outlive a server that crashed: one that waits for its answer holds Python's lock, and nothing in it,
        `parent_watch` for one, gets to end it.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.exit_code = process.wait()

    def is_ready(self) -> bool:
        """Whether every service answers: tritonserver opens gRPC, then HTTP, then the metrics, with time between."""
        # a proxy that the environment names is not for a server of our own
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        base = f"http://{self.http_url}/v2"
        try:
            with opener.open(base, timeout=2) as response:
                is_ours = json.loads(response.read())["name"] == self.options.server_id
            with opener.open(f"{base}/health/ready", timeout=2) as response:
                is_ready = is_ours and response.status == 200
            if is_ready and self.options.has_metrics:
                socket.create_connection((self.options.host, self.options.metrics_port), timeout=2).close()
            return is_ready
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _log_excerpt(self, num_lines: int = 15) -> str:
        """Why the model did not load, if the log says so; else the log's last errors."""
        if self.log_path is not None:
            text = self.log_path.read_text(errors="replace")
        else:
            assert self._echo is not None
            self._echo.join(timeout=5)
            text = b"".join(self._last_lines).decode(errors="replace")
        reason = re.search(r"failed to load '[^']*' version \d+: \w+: (.*?)(\\n|\"$)", text, re.MULTILINE)
        if reason is not None:
            return reason[1]
        lines = text.splitlines()
        wanted = [line for line in lines if "rror" in line or line.startswith("E")]
        return "\n".join((wanted or lines)[-num_lines:])
