"""What a request's time stamps say of it. The one definition for measured and simulated requests alike.

ttft: from send to the first piece of the answer. e2e: to the last one. tpot: (e2e - ttft) / (output tokens - 1), per
request. gaps: between one piece and the next; pooled over requests they are `icl`, the inter-chunk latency of aiperf
(ITL of vLLM's `bench serve`); `max_gap` is the longest of one request. All are None or empty where there are none; an
answer that comes in one piece has no tpot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class Timed(Protocol):
    """A request with latencies. has_succeeded: it ended as it was meant to."""

    @property
    def has_succeeded(self) -> bool: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float | None: ...
    @property
    def max_gap_s(self) -> float | None: ...
    @property
    def gaps_s(self) -> list[float]: ...


def ttft(sent_s: float, times_s: Sequence[float]) -> float | None:
    return times_s[0] - sent_s if times_s else None


def e2e(sent_s: float, times_s: Sequence[float]) -> float | None:
    return times_s[-1] - sent_s if times_s else None


def tpot(times_s: Sequence[float], num_output_tokens: int) -> float | None:
    if num_output_tokens < 2 or len(times_s) < 2:
        return None
    return (times_s[-1] - times_s[0]) / (num_output_tokens - 1)


def gaps(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times_s)]
