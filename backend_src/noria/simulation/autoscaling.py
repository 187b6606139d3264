"""How many replicas there should be, from what the ones there are have to do. Knows nothing of how they are run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noria.simulation.replica import Replica


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """A rule that is applied every interval_s.

    max_waiting, max_running_tokens, max_kv_share: what a serving replica should have at most, on average: requests in
        queues, tokens of running sequences, share of its KV blocks. None does not look at it.
    load_time_s: from starting a replica until it serves; it is paid for from the start.
    idle_s: a replica without any request for so long is stopped.
    """

    max_replicas: int
    min_replicas: int = 1
    max_waiting: float | None = None
    max_running_tokens: float | None = None
    max_kv_share: float | None = None
    interval_s: float = 15.0
    load_time_s: float = 60.0
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"min_replicas must be from 1 to max_replicas, not {self.min_replicas}")
        for name in ("max_waiting", "max_running_tokens", "max_kv_share", "interval_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, not {value}")
        for name in ("load_time_s", "idle_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number from 0, not {getattr(self, name)}")

    def num_wanted(self, serving: Sequence[Replica]) -> int:
        """Replicas that would bring the worst of the three down to its limit; as many as serve if none exceeds it.

        The formula of Kubernetes' HorizontalPodAutoscaler, upwards only: ceil(replicas * value / limit).
        """
        limits = (
            (self.max_waiting, sum(replica.num_waiting for replica in serving)),
            (self.max_running_tokens, sum(replica.num_running_tokens for replica in serving)),
            (self.max_kv_share, sum(replica.kv_share for replica in serving)),
        )
        wanted = max(math.ceil(total / limit) for limit, total in (*limits, (1.0, len(serving))) if limit is not None)
        return min(wanted, self.max_replicas)
