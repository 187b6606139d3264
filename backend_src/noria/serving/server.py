"""Finds a tritonserver and runs it over the model repository: `noria serve`, and what tests and comparisons start.

The server is the one on PATH (NVIDIA's container) or else the one that the wheel nvidia-pytriton carries. For the
latter a backend directory is put together from links: Triton's Python backend wants the stub for this Python beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from noria.config import ENVIRONMENT_VARIABLE
from noria.errors import ConfigError, EngineFailure

MODES = ("inflight", "static", "dynamic", "static_unary", "dynamic_unary")
# Triton gives each stub a region of 1 MiB that grows on demand; below this it has little to grow into.
MIN_SHM_BYTES = 64 * 2**20
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 45.0


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver and, if it does not know them itself, its backends and libraries."""

    binary: Path
    backend_directory: Path | None = None
    library_path: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve and where. engine: overrides for engine.json. extra_arguments go to tritonserver as they are."""

    repository: Path
    mode: str = "inflight"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    engine: Mapping[str, object] = field(default_factory=dict)
    extra_arguments: Sequence[str] = ()


def default_repository() -> Path:
    """The model repository beside this source tree. Raises ConfigError where there is none."""
    for parent in Path(__file__).resolve().parents:
        repository = parent / "model_repository"
        if (repository / "llm" / "config.pbtxt").is_file():
            return repository
    raise ConfigError("no model_repository was found beside this package; name one with --repository")


def find_triton(cache_dir: Path) -> TritonInstall:
    """The server to run. Raises ConfigError saying what to install."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonInstall(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "no tritonserver on PATH; run in NVIDIA's Triton container or `pip install nvidia-pytriton==0.7.0`"
        )
    root = Path(spec.submodule_search_locations[0]) / "tritonserver"
    backends = _link_backend(root, cache_dir)
    return TritonInstall(
        root / "bin" / "tritonserver",
        backends,
        (root.parent.parent / "nvidia_pytriton.libs", *_libpython_directories()),
    )


def _link_backend(root: Path, cache_dir: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        found = sorted(path.name for path in (root / "python_backend_stubs").glob("3.*"))
        raise ConfigError(f"the nvidia-pytriton wheel has no stub for Python {version}; it has {', '.join(found)}")
    source = root / "backends" / "python"
    links = {
        "libtriton_python.so": source / "libtriton_python.so",
        "triton_python_backend_utils.py": source / "triton_python_backend_utils.py",
        "triton_python_backend_stub": stub,
    }
    directory = cache_dir / "triton-backends" / version
    (directory / "python").mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        link = directory / "python" / name
        if link.is_symlink() and link.readlink() == target:
            continue
        # several servers may start at once: make the link aside, then put it in place
        aside = link.with_name(f"{name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(target)
        aside.replace(link)
    return directory


def _libpython_directories() -> tuple[Path, ...]:
    directory, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    return (Path(directory),) if directory and name and (Path(directory) / name).is_file() else ()


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria"


def check_mode(repository: Path, mode: str) -> None:
    """Raises ConfigError unless the repository has a config of that name."""
    configs = sorted(path.stem for path in (repository / "llm" / "configs").glob("*.pbtxt"))
    if mode not in configs:
        raise ConfigError(f"mode must be one of {', '.join(configs)}, not {mode!r}")


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raises ConfigError, naming the option, when a port is taken or two are the same."""
    if len(set(ports.values())) < len(ports):
        raise ConfigError(f"{', '.join(ports)} must differ, not {', '.join(map(str, ports.values()))}")
    for option, port in ports.items():
        if not 0 < port < 65536:
            raise ConfigError(f"{option} must be from 1 to 65535, not {port}")
        if not _is_free(host, port):
            raise ConfigError(f"{option} {port} is taken on {host}; choose another")


def _is_free(host: str, port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_ports(host: str, preferred: Sequence[int] = (8000, 8001, 8002)) -> tuple[int, int, int]:
    """Three free ports, the preferred ones where they are free."""
    chosen: list[int] = []
    for port in preferred:
        while port in chosen or not _is_free(host, port):
            with closing(socket.socket()) as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
        chosen.append(port)
    return chosen[0], chosen[1], chosen[2]


def check_shm(path: str = "/dev/shm") -> None:
    """Raises ConfigError when shared memory, through which Triton talks to its stubs, is as small as Docker's 64 MB."""
    try:
        stats = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); Triton's Python backend needs it") from None
    num_bytes = stats.f_bavail * stats.f_frsize
    if num_bytes < MIN_SHM_BYTES:
        raise ConfigError(
            f"{path} has {num_bytes / 2**20:.0f} MiB free, Triton's Python backend needs {MIN_SHM_BYTES / 2**20:.0f}; "
            "in Docker start the container with --shm-size=1g"
        )


def server_command(options: ServerOptions, install: TritonInstall) -> list[str]:
    command = [
        str(install.binary),
        f"--model-repository={options.repository}",
        f"--model-config-name={options.mode}",
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
    if options.engine:
        inherited = json.loads(environment.get(ENVIRONMENT_VARIABLE) or "{}")
        environment[ENVIRONMENT_VARIABLE] = json.dumps(inherited | dict(options.engine))
    return environment


def prepare(options: ServerOptions) -> tuple[list[str], dict[str, str]]:
    """Check the machine and the options; the command and the environment that serve them. Raises ConfigError."""
    check_mode(options.repository, options.mode)
    ports = {"--http-port": options.http_port, "--grpc-port": options.grpc_port, "--metrics-port": options.metrics_port}
    check_ports(options.host, ports)
    check_shm()
    install = find_triton(cache_directory())
    return server_command(options, install), server_environment(options, install, os.environ)


class RunningServer:
    """A tritonserver of our own: started, waited for, stopped by its process id. Use as a context manager.

    log_path: where its output goes; quoted when it does not become ready. None leaves it on the terminal.
    """

    def __init__(self, options: ServerOptions, log_path: Path | None = None) -> None:
        self.options = options
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

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
        with self.log_path.open("wb") if self.log_path else nullcontext() as log:
            # a session of its own, so that a Ctrl-C in the terminal reaches us first and we stop the server in order
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT if log else None, start_new_session=True
            )

    def wait(self) -> int:
        """Until the server ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def wait_until_ready(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Raises EngineFailure with the log's errors if the server ends, or is not ready in time."""
        assert self._process is not None
        start = time.monotonic()
        while time.monotonic() - start < READY_TIMEOUT_S:
            if self._process.poll() is not None:
                raise EngineFailure(f"tritonserver ended with code {self._process.returncode}:\n{self._log_excerpt()}")
            if self._is_ready():
                return
            if on_wait is not None:
                on_wait(time.monotonic() - start)
            time.sleep(0.1)
        raise EngineFailure(f"tritonserver was not ready within {READY_TIMEOUT_S:.0f} s:\n{self._log_excerpt()}")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of its session when that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _log_excerpt(self, num_lines: int = 15) -> str:
        if self.log_path is None:
            return "see its output above"
        lines = self.log_path.read_text(errors="replace").splitlines()
        wanted = [line for line in lines if "rror" in line or line.startswith("E")]
        return "\n".join((wanted or lines)[-num_lines:])
