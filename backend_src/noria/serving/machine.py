"""What a server needs of the machine before it starts: free ports, shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing

from noria.errors import ConfigError

# Triton gives each stub a region of 1 MiB that grows on demand; Docker's default of 64 MiB is soon too small for it.
MIN_SHM_BYTES = 128 * 2**20


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
    """Three free ports, the preferred ones where they are free; 0 prefers none."""
    chosen: list[int] = []
    for port in preferred:
        while port == 0 or port in chosen or not _is_free(host, port):
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
