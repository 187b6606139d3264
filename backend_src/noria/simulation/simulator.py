"""Serves requests with one engine in virtual time, and writes down what became of each. Knows no real clock.

simulator = Simulator(config, num_blocks=4096, cost_model=MeasuredCostModel.load(path))
result = simulator.run(make_requests(poisson(500, rate=2.0, seed=0), prompts, outputs))
print(result.summary(Objectives(ttft_s=2.0, tpot_s=0.1)))
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from noria.config import EngineConfig
from noria.simulation.batch_former import DynamicBatching
from noria.simulation.cost_model import CostModel
from noria.simulation.records import RequestRecord
from noria.simulation.replica import Replica
from noria.simulation.requests import SimRequest
from noria.simulation.summary import SimulationResult


class Simulator:
    """The scheduler of `config` under a cost model. See `Replica` for the arguments."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        cost_model: CostModel,
        *,
        num_host_blocks: int = 0,
        batching: DynamicBatching | None = None,
    ) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._cost_model = cost_model
        self._num_host_blocks = num_host_blocks
        self._batching = batching

    def run(self, requests: Sequence[SimRequest], concurrency: int | None = None) -> SimulationResult:
        """Until every request has ended; each run begins with an empty engine.

        concurrency: requests under way at most; the others are sent later than they would arrive, as a client that
            waits for answers sends them. None is no limit.
        """
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        replica = Replica(
            self._config,
            self._num_blocks,
            self._cost_model,
            num_host_blocks=self._num_host_blocks,
            batching=self._batching,
        )
        to_send = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_s))
        records: list[RequestRecord] = []
        now = 0.0
        while len(records) < len(requests):
            num_under_way = len(requests) - len(to_send) - len(records)
            can_send = bool(to_send) and (concurrency is None or num_under_way < concurrency)
            arrival_s = max(now, requests[to_send[0]].arrival_s) if can_send else math.inf
            # a request that arrives just when a step ends is in time for the next
            if arrival_s <= replica.next_event_s or arrival_s <= now:
                now = arrival_s
                index = to_send.popleft()
                replica.submit(index, requests[index], now)
            else:
                now = max(now, replica.next_event_s)
                records += replica.advance(now)
        records.sort(key=lambda record: record.index)
        return SimulationResult(tuple(records), replica.counters)
