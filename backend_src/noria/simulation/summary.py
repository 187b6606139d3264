"""Numbers that sum up a simulation, by the definitions of the client's report on a real measurement.

Latencies and tokens are those of finished requests; the others are counted beside them, and meet no objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from noria.simulation.records import Outcome, RequestRecord, StepCounters
from noria_bench.distribution import Distribution
from noria_bench.slo import Objectives


@dataclass(frozen=True, slots=True)
class Summary:
    """None where there is nothing to sum up.

    wall_s: from the first arrival to the last request's end. output_tokens_per_s, input_tokens_per_s: of finished
        requests, over wall_s. busy_s: spent in steps, summed over replicas.
    icl_s: gaps between tokens, those of all requests in one pool. max_gap_s: each request's longest.
    good_requests_per_s, good_share: requests that met the objectives, over wall_s and over all requests; None without
        objectives.
    """

    num_requests: int
    num_finished: int
    num_rejected: int
    num_deadline: int
    wall_s: float
    output_tokens_per_s: float | None
    input_tokens_per_s: float | None
    queue_s: Distribution | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    icl_s: Distribution | None
    max_gap_s: Distribution | None
    e2e_s: Distribution | None
    slot_utilisation: float | None
    mean_batch: float | None
    kv_waste: float | None
    prefix_hit_rate: float | None
    num_preemptions: int
    num_recomputed_tokens: int
    busy_s: float
    good_requests_per_s: float | None
    good_share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """records: in the order of the requests. counters: of all replicas together."""

    records: tuple[RequestRecord, ...]
    counters: StepCounters

    @property
    def wall_s(self) -> float:
        """From the first arrival to the last request's end."""
        if not self.records:
            return 0.0
        return max(record.ended_s for record in self.records) - min(record.sent_s for record in self.records)

    def summary(self, objectives: Objectives | None = None) -> Summary:
        finished = [record for record in self.records if record.outcome is Outcome.FINISHED]
        counters, totals, wall_s = self.counters, self.counters.totals, self.wall_s
        num_good = None if objectives is None else sum(map(objectives.are_met_by, self.records))
        return Summary(
            num_requests=len(self.records),
            num_finished=len(finished),
            num_rejected=self._num(Outcome.REJECTED),
            num_deadline=self._num(Outcome.DEADLINE),
            wall_s=wall_s,
            output_tokens_per_s=_over(sum(record.num_output_tokens for record in finished), wall_s),
            input_tokens_per_s=_over(sum(record.num_input_tokens for record in finished), wall_s),
            queue_s=Distribution.of(record.queue_s for record in finished),
            ttft_s=Distribution.of(record.ttft_s for record in finished),
            tpot_s=Distribution.of(record.tpot_s for record in finished),
            icl_s=Distribution.of(_pooled_gaps(finished)),
            max_gap_s=Distribution.of(record.max_gap_s for record in finished),
            e2e_s=Distribution.of(record.e2e_s for record in finished),
            slot_utilisation=totals.slot_utilisation,
            mean_batch=totals.mean_batch,
            kv_waste=totals.kv_waste,
            prefix_hit_rate=totals.prefix_hit_rate,
            num_preemptions=counters.preemptions,
            num_recomputed_tokens=counters.recomputed_tokens,
            busy_s=counters.busy_s,
            good_requests_per_s=_over(num_good, wall_s),
            good_share=_over(num_good, len(self.records)),
        )

    def _num(self, outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in self.records)


def _pooled_gaps(records: Sequence[RequestRecord]) -> Iterable[float]:
    return (gap for record in records for gap in record.gaps_s)


def _over(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole > 0 else None
