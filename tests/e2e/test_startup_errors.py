"""What stops a server from starting, said in its log by name; and `tritonserver` without our launcher."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.config import default_cache_dir
from noria.errors import EngineFailure
from noria.serving.machine import free_ports
from noria.serving.server import RunningServer, ServerOptions, default_repository
from noria.serving.triton_install import find_triton
from support.raw_triton import RawStream, text_inputs
from support.tiny_models import tiny_model_dir

HOST = "127.0.0.1"


def repository_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(default_repository(), tmp_path / "repository"))


def startup_error(tmp_path: Path, repository: Path, **engine: Any) -> str:
    http_port, grpc_port, metrics_port = free_ports(HOST, (0, 0, 0))
    options = ServerOptions(repository, "inflight", HOST, http_port, grpc_port, metrics_port, engine)
    with pytest.raises(EngineFailure) as caught, RunningServer(options, tmp_path / "server.log"):
        pass
    return str(caught.value)


def engine_json(text: str) -> Callable[[Path], None]:
    return lambda repository: (repository / "llm/1/engine.json").write_text(text) and None


def config_parameter(key: str, value: str) -> Callable[[Path], None]:
    def edit(repository: Path) -> None:
        path = repository / "llm/configs/inflight.pbtxt"
        path.write_text(path.read_text() + f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')

    return edit


BAD_CONFIGS = {
    "unknown key": (engine_json('{"max_num_sequences": 4}'), "unknown key 'max_num_sequences'; valid are model"),
    "bad value": (engine_json('{"block_size": 0}'), "block_size must be from 1 to 256, not 0"),
    "wrong type": (engine_json('{"max_num_seqs": "eight"}'), "max_num_seqs must be a whole number, not 'eight'"),
    "not JSON": (engine_json("{"), "engine.json is not valid JSON"),
    "unknown parameter": (config_parameter("max_seqs", "4"), "the config's parameters: unknown key 'max_seqs'"),
    "bad parameter": (config_parameter("kv_cache_gib", "much"), "kv_cache_gib must be a number, not 'much'"),
}


@pytest.mark.parametrize(("edit", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_config_names_its_key(tmp_path: Path, edit: Callable[[Path], None], message: str) -> None:
    repository = repository_copy(tmp_path)
    edit(repository)
    assert message in startup_error(tmp_path, repository)


@pytest.mark.slow
def test_a_bad_model_names_its_file(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", "llama")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in startup_error(tmp_path, default_repository(), model=str(model))
    weights.unlink()
    assert "model.safetensors" in startup_error(tmp_path, default_repository(), model=str(model))
    (model / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    assert "GPT2LMHeadModel" in startup_error(tmp_path, default_repository(), model=str(model))
    missing = tmp_path / "nowhere.gguf"
    assert str(missing) in startup_error(tmp_path, default_repository(), model=str(missing))


def test_a_truncated_gguf_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
    assert str(path) in startup_error(tmp_path, default_repository(), model=str(path))


def test_tritonserver_alone_serves_the_repository_in_the_environment_that_the_readme_states(tmp_path: Path) -> None:
    """No launcher: the virtual environment first on PATH, the wheel's libraries, the backend directory."""
    model = tiny_model_dir(tmp_path / "model", "qwen2")
    install = find_triton(default_cache_dir())
    http_port, grpc_port, metrics_port = free_ports(HOST, (0, 0, 0))
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(os.sys.executable).parent), os.environ["PATH"]]),  # type: ignore[attr-defined]
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, install.library_path)),
        "NORIA_ENGINE": json.dumps({"model": str(model), "kv_cache_gib": 0.05}),
    }
    command = [
        str(install.binary),
        f"--model-repository={default_repository()}",
        "--model-config-name=static",
        *([f"--backend-directory={install.backend_directory}"] if install.backend_directory else []),
    ]
    for kind, port in (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port)):
        command += [f"--{kind}-address={HOST}", f"--{kind}-port={port}"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        # only to wait for a server that is already running
        waiter = RunningServer(
            ServerOptions(default_repository(), "static", HOST, http_port, grpc_port, metrics_port, server_id="triton")
        )
        waiter._process = process
        waiter.wait_until_ready()
        (response,) = RawStream(f"{HOST}:{grpc_port}", text_inputs("hello", {"max_tokens": 3})).all()
        assert response.outputs["text_output"][0].startswith("hello")
    finally:
        process.terminate()
        assert process.wait(60) == 0
