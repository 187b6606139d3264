"""Finds a tritonserver: the one on PATH (NVIDIA's container), or else the one that the wheel nvidia-pytriton carries.

For the latter a backend directory is put together from links: Triton's Python backend wants its stub for this Python
beside it. Knows nothing of models or of how the server is run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from noria.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver and, if it does not know them itself, its backends and libraries."""

    binary: Path
    backend_directory: Path | None = None
    library_path: tuple[Path, ...] = ()


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
