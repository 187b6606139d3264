"""What a process holds of the machine, by /proc (Linux). Knows Triton's stub by its name, nothing of what they do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from noria.errors import EngineFailure

PROC = Path("/proc")
STUB = b"triton_python_backend_stub"
SHM = "/dev/shm/"


@dataclass(frozen=True)
class ProcessUse:
    """rss_mib: resident memory, pages that it shares with others included. pss_mib: shared pages in equal parts among
    those who map them; None where the system does not tell. MiB are 2**20 bytes."""

    rss_mib: float
    pss_mib: float | None
    num_fds: int
    num_threads: int


def process_use(pid: int, name: str) -> ProcessUse:
    """Raises EngineFailure, with the name, if the process has ended."""
    folder = PROC / str(pid)
    try:
        status = _fields(folder / "status")
        num_fds = len(os.listdir(folder / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        status, num_fds = {}, 0
    # one that nobody has waited for yet has no memory any more
    if "VmRSS" not in status:
        raise EngineFailure(f"{name} has ended (process {pid})")
    return ProcessUse(_mib(status["VmRSS"]), _pss_mib(folder), num_fds, int(status["Threads"]))


def shm_mib(pids: Iterable[int]) -> float:
    """Of the files in /dev/shm that any of the processes has mapped, each counted once."""
    paths = set()
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        paths |= {line[line.index(SHM) :] for line in lines if SHM in line}
    return sum(_num_bytes(path) for path in paths) / 2**20


def stub_of(server_pid: int) -> int:
    """The process in which Triton runs the Python model. Raises EngineFailure unless there is exactly one."""
    pids = [pid for pid in _children(server_pid) if STUB in _command(pid)]
    if len(pids) != 1:
        raise EngineFailure(f"tritonserver must have one process {STUB.decode()}, not {len(pids)}")
    return pids[0]


def _children(parent_pid: int) -> list[int]:
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                status = _fields(folder / "status")
            # ended since
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(status["PPid"]) == parent_pid:
                found.append(int(folder.name))
    return found


def _command(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _pss_mib(folder: Path) -> float | None:
    try:
        return _mib(_fields(folder / "smaps_rollup")["Pss"])
    except (OSError, KeyError):
        return None


def _fields(path: Path) -> dict[str, str]:
    """The lines `name: value`."""
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _mib(text: str) -> float:
    """Of `1234 kB`, which are KiB."""
    return int(text.removesuffix(" kB")) / 1024


def _num_bytes(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    # its name is gone already
    except FileNotFoundError:
        return 0
