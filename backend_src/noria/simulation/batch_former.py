"""Which requests Triton's dynamic batcher sends to a model together: a model of its queue, in virtual time.

For one instance whose `execute` blocks until its batch is over, and requests of one size with equal inputs. Knows
nothing of what a request is. After Triton's core, `dynamic_batch_scheduler.cc`.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from noria.config import EngineConfig

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """A config.pbtxt's values of the same names. Triton refuses preferred sizes above max_batch_size."""

    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {self.max_batch_size}")
        for size in self.preferred_batch_sizes:
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(f"preferred_batch_sizes must be from 1 to {self.max_batch_size}, not {size}")
        if not 0 <= self.max_queue_delay_s < math.inf:
            raise ValueError(f"max_queue_delay_s must be a finite number from 0, not {self.max_queue_delay_s}")


def dynamic_batching_for(config: EngineConfig) -> DynamicBatching:
    """What model_repository/llm/configs/*.pbtxt say for a mode, with max_num_seqs as the max_batch_size.

    In flight everything goes on to the engine at once.
    """
    size = config.max_num_seqs
    if config.batching_mode == "static":
        return DynamicBatching(size, (size,), 0.5)
    if config.batching_mode == "dynamic":
        return DynamicBatching(size, (max(1, size // 2), size), 100e-6)
    return DynamicBatching(sys.maxsize)


class BatchFormer(Generic[Item]):
    """First come, first served. `take` is called only while the instance is idle."""

    def __init__(self, settings: DynamicBatching) -> None:
        self._settings = settings
        self._pending: deque[tuple[float, Item]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, item: Item, now: float) -> None:
        self._pending.append((now, item))

    @property
    def due_s(self) -> float:
        """When the next batch goes if nothing else comes: -inf is at once, inf never."""
        if not self._pending:
            return math.inf
        return -math.inf if self._preferred_size() else self._delay_end_s

    def take(self, now: float) -> list[Item]:
        """The batch that goes now; empty if it is worth waiting.

        When the oldest has waited max_queue_delay_s all that is pending goes, up to max_batch_size; before that the
        largest preferred size that is pending.
        """
        if not self._pending:
            return []
        size = self._settings.max_batch_size if now >= self._delay_end_s else self._preferred_size()
        return [self._pending.popleft()[1] for _ in range(min(size, len(self._pending)))]

    @property
    def _delay_end_s(self) -> float:
        return self._pending[0][0] + self._settings.max_queue_delay_s

    def _preferred_size(self) -> int:
        return max((size for size in self._settings.preferred_batch_sizes if size <= len(self._pending)), default=0)
