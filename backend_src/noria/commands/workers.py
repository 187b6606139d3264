"""Processes that simulate side by side, and end with the command that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool


@contextmanager
def worker_processes(most: int) -> Iterator[Pool]:
    """One for each core that may be used, up to `most`. They are ended when the block is left, whatever they are at."""
    with multiprocessing.Pool(min(most, len(os.sched_getaffinity(0))), _leave_signals_to_the_parent) as pool:
        yield pool


def _leave_signals_to_the_parent() -> None:
    """An interrupt that a worker takes for itself, at the wrong moment, leaves the parent waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
