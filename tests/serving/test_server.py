"""The launcher's parts that need no running server."""

import json
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from noria import cli
from noria.errors import ConfigError
from noria.serving import triton_install
from noria.serving.machine import check_ports, check_shm, free_ports
from noria.serving.server import (
    RunningServer,
    ServerOptions,
    check_mode,
    default_repository,
    engine_environment,
    server_command,
    server_environment,
)
from noria.serving.triton_install import TritonInstall, find_triton

HOST = "127.0.0.1"


def test_a_taken_port_is_named_and_free_ports_go_around_it() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port {port} is taken on 127.0.0.1"):
            check_ports(HOST, {"--grpc-port": port})
        chosen = free_ports(HOST, (port, 0, 0))
        assert port not in chosen
        assert len(set(chosen)) == 3


@pytest.mark.parametrize(
    ("ports", "message"),
    [((0, 1), "--a must be from 1 to 65535, not 0"), ((9000, 9000), "must differ, not 9000")],
)
def test_impossible_ports_are_named(ports: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ports(HOST, dict(zip(("--a", "--b"), ports, strict=True)))


def test_small_shared_memory_is_an_error_that_says_how_to_enlarge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_shm()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=64, f_frsize=2**20))
    with pytest.raises(ConfigError, match=r"/dev/shm has 64 MiB free.*--shm-size=1g"):
        check_shm()


def test_an_unknown_mode_lists_the_configs() -> None:
    with pytest.raises(ConfigError, match=r"mode must be one of dynamic, dynamic_unary, inflight, .*not 'orca'"):
        check_mode(default_repository(), "orca")


def test_the_servers_python_comes_first_on_path_and_its_threads_sleep() -> None:
    install = TritonInstall(Path("/opt/tritonserver"), Path("/backends"), (Path("/libs"),))
    options = ServerOptions(Path("repository"), "static", engine={"max_num_seqs": 2})
    environment = server_environment(options, install, {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/lib"})
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == "/libs:/lib"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert json.loads(environment["NORIA_ENGINE"]) == {"max_num_seqs": 2}
    assert server_environment(options, install, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_command_binds_every_service_and_passes_arguments_on() -> None:
    options = ServerOptions(Path("/models"), "dynamic", HOST, 1, 2, 3, extra_arguments=["--log-verbose=1"])
    command = server_command(options, TritonInstall(Path("/bin/tritonserver"), Path("/backends")))
    assert command[:3] == ["/bin/tritonserver", "--model-repository=/models", "--model-config-name=dynamic"]
    for argument in ("--http-port=1", "--grpc-port=2", "--metrics-port=3", "--grpc-address=127.0.0.1"):
        assert argument in command
    assert command[-1] == "--log-verbose=1"


def test_engine_overrides_go_over_those_of_the_environment() -> None:
    merged = json.loads(engine_environment({"dtype": "float16"}, {"NORIA_ENGINE": '{"dtype": "x", "device": "cpu"}'}))
    assert merged == {"dtype": "float16", "device": "cpu"}
    with pytest.raises(ConfigError, match="NORIA_ENGINE is not valid JSON"):
        engine_environment({}, {"NORIA_ENGINE": "dtype=float16"})


def test_a_python_without_a_stub_is_an_error_that_lists_those_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_install.shutil, "which", lambda name: None)
    monkeypatch.setattr(triton_install.sys, "version_info", SimpleNamespace(major=3, minor=7))
    with pytest.raises(ConfigError, match=r"no stub for Python 3\.7; it has 3\.10, 3\.11"):
        find_triton(tmp_path)


def test_a_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install.shutil, "which", lambda name: "/opt/tritonserver/bin/tritonserver")
    assert find_triton(tmp_path) == TritonInstall(Path("/opt/tritonserver/bin/tritonserver"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--engine", "max_num_seqs"], "--engine takes KEY=VALUE, not 'max_num_seqs'"),
        (["serve", "--engine", "max_seqs=4"], "unknown key 'max_seqs'"),
        (["serve", "--engine", "max_num_seqs=none"], "max_num_seqs must be a whole number, not 'none'"),
        (["serve", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["serve", "--repository", "/nowhere"], "/nowhere"),
    ],
)
def test_the_command_line_names_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("extra_arguments", [[], ["--allow-metrics=false"], ["--metrics-port=1"]])
def test_a_server_is_ready_when_its_metrics_answer_too(extra_arguments: list[str]) -> None:
    """tritonserver opens the metrics last; who is told "ready" before may find the port closed."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"name": options.server_id}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Ready) as http, socket.socket() as metrics:
        metrics.bind((HOST, 0))  # taken, and refuses connections until it listens
        options = ServerOptions(
            Path("/models"),
            http_port=http.server_port,
            metrics_port=metrics.getsockname()[1],
            extra_arguments=extra_arguments,
        )
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            assert RunningServer(options).is_ready() == bool(extra_arguments)
            metrics.listen()
            assert RunningServer(options).is_ready()
        finally:
            http.shutdown()
