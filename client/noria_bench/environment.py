"""The circumstances of a measurement, written down so that it can be judged and done again.

Knows the machine, the installed packages and the source tree; what a server loaded is its starter's to say.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("noria", "torch", "triton", "transformers", "tritonclient", "nvidia-pytriton", "numpy", "numba", "grpcio")
# that change how threads compute and wait
VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME"),
    *("MKL_NUM_THREADS", "TORCH_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NORIA_ENGINE", "GRPC_EXPERIMENTS"),
)
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def machine() -> dict[str, Any]:
    """CPU, memory, GPUs, system, Python, packages, thread settings, and the source tree's revision."""
    return {
        "cpu": _cpu(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "source": _revision(Path(__file__).parent),
    }


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores' worth of time others take while nothing of ours runs; seen over so many seconds."""
    before = _cpu_times()
    time.sleep(seconds)
    busy, total = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    return round(busy / total * (os.cpu_count() or 1), 3) if total else 0.0


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two environments differ, a line each: `packages.torch: 2.13.0, now 2.14.0`."""
    found = []
    for key in dict.fromkeys([*earlier, *now]):
        then, later = earlier.get(key), now.get(key)
        if isinstance(then, Mapping) and isinstance(later, Mapping):
            found += differences(then, later, f"{prefix}{key}.")
        elif then != later:
            found.append(f"{prefix}{key}: {then}, now {later}")
    return found


def _cpu() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {"model": platform.processor()}
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(values.get("flags", "").split())
    return {"model": values.get("model name", platform.processor()), "flags": [f for f in _CPU_FLAGS if f in flags]}


def _gpus() -> list[str]:
    """Name, memory and driver of each."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    return _output([tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]).splitlines()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision(folder: Path) -> dict[str, Any]:
    """Of a checkout; empty for an installed package."""
    git = ["git", "-C", str(folder)]
    # an environment in somebody's checkout is not ours
    if not _output([*git, "ls-files", Path(__file__).name]):
        return {}
    top = Path(_output([*git, "rev-parse", "--show-toplevel"]))
    sources = [str(top / name) for name in ("backend_src", "client", "model_repository")]
    is_modified = bool(_output([*git, "status", "--porcelain", "--", *sources]))
    return {"revision": _output([*git, "rev-parse", "HEAD"]), "is_modified": is_modified}


def _output(command: Sequence[str]) -> str:
    """Empty where the command cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_times() -> tuple[float, float]:
    """(busy, total) ticks of all cores since the start."""
    try:
        ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
    # the fourth and fifth are idle and waiting for a disk
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
