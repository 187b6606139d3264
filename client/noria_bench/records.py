"""One request's way through a measurement, and its line in a result's JSONL file.

Times are seconds of the load generator's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from noria_bench import latencies
from noria_bench.errors import BenchError


class Outcome(str, Enum):
    """How a request ended.

    finished: with its whole answer. cancelled: by the client, as the workload asked. rejected: the server's queue was
    full. expired: its deadline passed. failed: any other error. aborted: the measurement ended before it did.
    """

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EXPIRED = "expired"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Chunk:
    """One piece of an answer as it arrived."""

    time_s: float
    num_tokens: int


@dataclass(frozen=True)
class RequestRecord:
    """index: its place in the workload. request_class: see `workload.RequestClass`.

    due_s: when it was to be sent; None in a closed loop. sent_s: when it was. ended_s: when the outcome was known.
    num_input_tokens: as the server counted them. is_warm_up: left out of the summary.
    error: what the server said, None if it finished or was cancelled as asked.
    Latencies as in `latencies`, from sent_s on.
    """

    index: int
    sent_s: float
    ended_s: float
    num_input_tokens: int
    chunks: tuple[Chunk, ...]
    error: str | None = None
    outcome: Outcome = Outcome.FINISHED
    request_class: str = "default"
    due_s: float | None = None
    is_warm_up: bool = False

    @property
    def has_succeeded(self) -> bool:
        return self.outcome is Outcome.FINISHED

    @property
    def num_output_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def lateness_s(self) -> float | None:
        """How much later than due it was sent."""
        return None if self.due_s is None else self.sent_s - self.due_s

    @property
    def times_s(self) -> list[float]:
        return [chunk.time_s for chunk in self.chunks]

    @property
    def ttft_s(self) -> float | None:
        return latencies.ttft(self.sent_s, self.times_s)

    @property
    def e2e_s(self) -> float | None:
        return latencies.e2e(self.sent_s, self.times_s)

    @property
    def tpot_s(self) -> float | None:
        return latencies.tpot(self.times_s, self.num_output_tokens)

    @property
    def gaps_s(self) -> list[float]:
        return latencies.gaps(self.times_s)

    @property
    def max_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    def to_json(self) -> dict[str, Any]:
        """chunks as [time, tokens] pairs; times rounded to microseconds."""
        return {
            "index": self.index,
            "class": self.request_class,
            "outcome": self.outcome.value,
            "due_s": None if self.due_s is None else round(self.due_s, 6),
            "sent_s": round(self.sent_s, 6),
            "ended_s": round(self.ended_s, 6),
            "num_input_tokens": self.num_input_tokens,
            "chunks": [[round(chunk.time_s, 6), chunk.num_tokens] for chunk in self.chunks],
            "error": self.error,
            "is_warm_up": self.is_warm_up,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RequestRecord:
        """Raises BenchError for what `to_json` cannot have written."""
        try:
            times_s = [line["sent_s"], line["ended_s"], *(time_s for time_s, _ in line["chunks"])]
            if not all(math.isfinite(time_s) for time_s in times_s):
                raise ValueError("a time that is not finite")
            return cls(
                index=line["index"],
                sent_s=line["sent_s"],
                ended_s=line["ended_s"],
                num_input_tokens=line["num_input_tokens"],
                chunks=tuple(Chunk(time_s, num_tokens) for time_s, num_tokens in line["chunks"]),
                error=line["error"],
                outcome=Outcome(line["outcome"]),
                request_class=line["class"],
                due_s=line["due_s"],
                is_warm_up=line["is_warm_up"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"not a request's record: {error!r} in {str(line)[:200]}") from None
