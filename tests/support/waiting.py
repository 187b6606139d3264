"""Waits for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
