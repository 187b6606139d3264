"""One run of one configuration at one rate, held against an SLO. Knows nothing of how the next one is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from noria.simulation.cost_model import CostModel
from noria.simulation.requests import SimRequest
from noria.simulation.simulator import Simulator
from noria.simulation.summary import SimulationResult
from noria.simulation.tuning_space import Candidate
from noria_bench.arrivals import gamma
from noria_bench.slo import Slo, latency_figure

# reported whatever the SLO asks for
REPORTED = ("ttft_p95", "tpot_p95")
# of a run's length, that the last quarter of its requests waits on average: more, and the queue only grows
MAX_BACKLOG = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """rate: requests a second. is_long: for the last word; else as short as tells candidates apart."""

    candidate: Candidate
    rate: float
    seed: int = 0
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """figures: seconds, by the SLO's keys and REPORTED. worst_key: of the SLO. excess: its figure as a multiple of its
    limit, or more where the queue only grows."""

    trial: Trial
    figures: Mapping[str, float]
    worst_key: str
    excess: float

    @property
    def is_kept(self) -> bool:
        return self.excess <= 1


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs trials. Equal trials give equal measurements.

    requests: whose lengths are sent, shuffled by the seed and again from the start when they are used up; their
        arrivals are not read. alone_s: that one takes on average with the engine to itself, see `time_alone`.
    burstiness: coefficient of variation of the gaps between arrivals.
    """

    requests: Sequence[SimRequest]
    slo: Slo
    cost_model: CostModel
    num_blocks: int
    alone_s: float
    num_host_blocks: int = 0
    burstiness: float = 1.0

    def __call__(self, trial: Trial) -> Measurement:
        candidate = trial.candidate
        simulator = Simulator(
            candidate.config,
            self.num_blocks,
            self.cost_model,
            num_host_blocks=self.num_host_blocks,
            batching=candidate.batching,
        )
        num_requests = self.num_requests(trial.rate, trial.is_long)
        result = simulator.run(self._arrivals(num_requests, trial.rate, trial.seed))
        figures = {key: latency_figure(result.records, key) for key in dict.fromkeys([*self.slo.limits_s, *REPORTED])}
        worst_key, excess = self.slo.worst(figures)
        return Measurement(trial, figures, worst_key, max(excess, _backlog(result) / MAX_BACKLOG))

    @property
    def usual_rate(self) -> float:
        return 0.5 / self.alone_s

    @property
    def lowest_rate(self) -> float:
        """So low that hardly two requests meet."""
        return 0.02 / self.alone_s

    def num_requests(self, rate: float, is_long: bool) -> int:
        """Enough that a queue that only grows breaks the limits, and for the percentiles to mean something.

        At a rate that is too high by a share d the last request waits d times the run's length.
        """
        limits = [limit for key, limit in self.slo.limits_s.items() if key.startswith(("ttft", "e2e"))]
        span_s = 10 * max([self.alone_s, *limits])
        low, high = (600, 2000) if is_long else (200, 500)
        num = min(max(int(rate * span_s * (3 if is_long else 1)), low), high)
        # a copy of a prompt with tokens of its own would be found in the prefix cache as a whole
        is_repeatable = all(request.prompt_token_ids is None for request in self.requests)
        return num if is_repeatable else min(num, len(self.requests))

    def _arrivals(self, num: int, rate: float, seed: int) -> list[SimRequest]:
        """At any rate the same requests, whose gaps only stretch."""
        rng = np.random.default_rng(seed)
        order: list[int] = []
        while len(order) < num:
            order += (int(place) for place in rng.permutation(len(self.requests)))
        arrivals_s = gamma(num, rate, self.burstiness, seed)
        return [
            replace(self.requests[place], arrival_s=arrival_s)
            for place, arrival_s in zip(order, arrivals_s, strict=False)
        ]


def time_alone(requests: Sequence[SimRequest], candidate: Candidate, num_blocks: int, cost_model: CostModel) -> float:
    """Seconds that one of the first requests takes with the engine to itself, on average."""
    some = [replace(request, arrival_s=0.0) for request in requests[:8]]
    simulator = Simulator(candidate.config, num_blocks, cost_model, batching=candidate.batching)
    return simulator.run(some, concurrency=1).wall_s / len(some)


def _backlog(result: SimulationResult) -> float:
    """How long the last quarter of the requests waits on average, as a share of the time in which they come."""
    records = result.records
    last = records[-max(1, len(records) // 4) :]
    span_s = records[-1].sent_s - records[0].sent_s
    # a refused one has not waited, but what it came for breaks any limit
    waits_s = [record.queue_s for record in last if record.queue_s is not None]
    return sum(waits_s) / len(waits_s) / span_s if waits_s and span_s > 0 else 0.0
