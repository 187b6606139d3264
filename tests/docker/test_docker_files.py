"""The container's files against the code that they run: nothing builds the image in CI, so names are checked."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from noria.cli import _parser as cli_parser
from noria.config_sources import load_engine_config
from noria.serving.machine import MIN_SHM_BYTES
from noria.serving.server import READY_TIMEOUT_S, STOP_TIMEOUT_S, ServerOptions, check_mode

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"s": 1, "m": 60}
BYTES = {"m": 2**20, "g": 2**30}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's (KEYWORD, rest), comments dropped and continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def only(keyword: str) -> str:
    (rest,) = (rest for name, rest in instructions() if name == keyword)
    return rest


def copies() -> list[tuple[list[str], str]]:
    """Sources and destination of each COPY."""
    words = [
        [w for w in shlex.split(rest) if not w.startswith("--")] for name, rest in instructions() if name == "COPY"
    ]
    return [(sources, destination) for *sources, destination in words]


def build_argument(name: str) -> str:
    (value,) = (rest.partition("=")[2] for key, rest in instructions() if key == "ARG" and rest.startswith(f"{name}="))
    return value


def ports() -> list[int]:
    return [int(port) for port in only("EXPOSE").split()]


def noria_arguments() -> list[str]:
    """What the entrypoint gives to `noria`."""
    entrypoint = json.loads(only("ENTRYPOINT"))
    return entrypoint[entrypoint.index("noria") + 1 :]


def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


def with_defaults(value: str) -> str:
    """As Compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def quantity(text: str, units: dict[str, int]) -> int:
    match = re.fullmatch(r"(\d+)([a-z])", text)
    assert match is not None, text
    return int(match[1]) * units[match[2]]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    split = [line.split(";")[0].strip().split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in split}


def test_what_is_copied_exists_and_reaches_the_build_context() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [source for copied, _ in copies() for source in copied]
    assert {"pyproject.toml", "requirements.lock", "backend_src", "client", "model_repository"} == set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed


def test_the_extras_exist() -> None:
    declared = metadata("noria").get_all("Provides-Extra")
    assert declared is not None
    assert set(build_argument("EXTRAS").split(",")) == {"serve", "gpu"} <= set(declared)


def test_the_lock_can_constrain_what_the_image_installs() -> None:
    """A pin outside of pyproject's range would fail the build; a package without a pin would be any version."""
    extras = build_argument("EXTRAS").split(",")
    wanted = [Requirement(text) for text in requires("noria") or ()]
    wanted = [r for r in wanted if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    # torch for a GPU pins the kernel compiler itself: a second pin could contradict it
    (left_out,) = (found for _, rest in instructions() for found in re.findall(r"grep -v '\^(\w+)==' requ", rest))
    assert {r.name for r in wanted if r.name not in pins()} == set()
    assert left_out == "triton"
    assert [str(r) for r in wanted if not r.specifier.contains(pins()[r.name])] == []


def test_the_embedded_model_is_pinned_by_the_line_that_the_build_looks_for() -> None:
    (pattern,) = (
        match for _, rest in instructions() for match in re.findall(r"grep '([^']+)' requirements.lock", rest)
    )
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len([line for line in lines if re.match(pattern, line)]) == 1


def test_the_entrypoint_serves_the_copied_repository_to_the_outside() -> None:
    args = cli_parser().parse_args(noria_arguments())
    assert (args.command, args.host) == ("serve", "0.0.0.0")
    assert (["model_repository"], str(args.repository)) in copies()


def test_exposed_and_probed_ports_are_the_servers_own() -> None:
    options = ServerOptions(ROOT)
    assert ports() == [options.http_port, options.grpc_port, options.metrics_port]
    command = json.loads(only("HEALTHCHECK").partition("CMD ")[2])[-1]
    ready, _, heartbeat = command.partition(" && ")
    assert f"http://127.0.0.1:{options.http_port}/v2/health/ready" in ready
    program, *arguments = shlex.split(heartbeat)
    assert (program, cli_parser().parse_args(arguments).command) == ("noria", "health")
    assert f"127.0.0.1:{options.metrics_port}" in arguments


def test_the_probe_waits_for_a_slow_start() -> None:
    match = re.search(r"--start-period=(\w+)", only("HEALTHCHECK"))
    assert match is not None
    assert quantity(match[1], SECONDS) > READY_TIMEOUT_S


@pytest.mark.parametrize("name", ["noria", "noria-cpu"])
class TestComposeService:
    def test_publishes_every_port_on_this_machine_alone(self, name: str) -> None:
        assert [with_defaults(port) for port in services()[name]["ports"]] == [f"127.0.0.1:{p}:{p}" for p in ports()]

    def test_arguments_are_ones_that_serve_takes(self, name: str) -> None:
        command = [with_defaults(word) for word in services()[name]["command"]]
        args = cli_parser().parse_args([*noria_arguments(), *command])
        check_mode(ROOT / "model_repository", args.mode)
        engine = dict(pair.split("=", 1) for pair in args.engine)
        engine_json = ROOT / "model_repository" / "llm" / "1" / "engine.json"
        overridden = load_engine_config(engine_json, environment=json.dumps({**engine, "model": args.model}))
        assert overridden == load_engine_config(engine_json), "without variables Compose changes nothing"

    def test_gives_triton_its_shared_memory_and_its_time_to_stop(self, name: str) -> None:
        assert quantity(services()[name]["shm_size"], BYTES) >= 4 * MIN_SHM_BYTES
        assert quantity(services()[name]["stop_grace_period"], SECONDS) > STOP_TIMEOUT_S

    def test_keeps_the_cache_where_the_image_has_it(self, name: str) -> None:
        targets = [volume.split(":")[1] for volume in services()[name]["volumes"] if volume.startswith("cache:")]
        assert targets == [only("VOLUME")]
        assert any(f"XDG_CACHE_HOME={only('VOLUME')}" in rest for keyword, rest in instructions() if keyword == "ENV")


def test_only_the_default_service_asks_for_a_gpu() -> None:
    assert "deploy" in services()["noria"]
    assert "profiles" not in services()["noria"]
    assert "deploy" not in services()["noria-cpu"]
    assert services()["noria-cpu"]["profiles"] == ["cpu"]
