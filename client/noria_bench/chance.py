"""Streams of chance that do not disturb each other: what is drawn from one changes nothing in another."""

from __future__ import annotations

import hashlib

import numpy as np


def stream_seed(seed: int, *names: object) -> int:
    """A seed below 2**64 for the stream of these names. Names are told apart by their text."""
    key = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def stream(seed: int, *names: object) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, *names))
