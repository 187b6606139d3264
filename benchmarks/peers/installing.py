"""Gives each peer a Python of its own with pinned packages, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from peers.registry import PeerSpec

# of what was installed, so that new pins are taken
_MARKER = "peer-requirements.sha256"
TIMEOUT_S = 3600


class InstallError(Exception):
    """A peer's environment cannot be made; the message says why."""


def python_of(spec: PeerSpec, venvs: Path) -> Path:
    """What runs the peer, made before or not."""
    venv = venv_of(spec, venvs)
    return Path(sys.executable) if venv is None else venv / "bin" / "python"


def venv_of(spec: PeerSpec, venvs: Path) -> Path | None:
    """None for a peer that runs in Noria's environment."""
    return None if spec.requirements is None else venvs / spec.requirements.stem


def install(spec: PeerSpec, venvs: Path, say: Callable[[str], None]) -> None:
    """Does nothing where the pinned packages are there. Raises InstallError."""
    venv = venv_of(spec, venvs)
    if venv is None or spec.requirements is None:
        return
    wanted = _wanted(spec)
    marker = venv / _MARKER
    if marker.is_file() and marker.read_text() == wanted:
        return
    say(f"{spec.name}: installing into {venv}, once")
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    environment = {**os.environ, **spec.build}
    _run([sys.executable, "-m", "venv", str(venv)], environment)
    packages = ["--no-deps", "--requirement", str(spec.requirements)]
    _run([str(python_of(spec, venvs)), "-m", "pip", "install", "--disable-pip-version-check", *packages], environment)
    marker.write_text(wanted)
    say(f"{spec.name}: installed in {time.monotonic() - start_s:.0f} s")


def _wanted(spec: PeerSpec) -> str:
    assert spec.requirements is not None
    content = spec.requirements.read_text() + repr(sorted(spec.build.items())) + sys.version
    return hashlib.sha256(content.encode()).hexdigest()


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from None
    if done.returncode != 0:
        raise InstallError(reason(done.stderr + done.stdout, f"exit code {done.returncode}"))


def reason(text: str, otherwise: str) -> str:
    """The last line of a log that names an error, or its last, or `otherwise` for an empty one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [otherwise])[-1][:300]
