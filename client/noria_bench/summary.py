"""Numbers that sum up one run: what the client saw, what the server counted meanwhile, whether both agree.

Latencies and tokens are those of finished requests; every other request is counted beside them and meets no objective:
refused, late, failed and aborted ones stand in goodput's denominator. Requests that the workload cancels on purpose,
and warm-up, are left out of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from noria_bench.distribution import Distribution
from noria_bench.engine_counters import EngineCounters
from noria_bench.records import Outcome, RequestRecord
from noria_bench.slo import Objectives


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The requests of one class, or of all. None where there is nothing to sum up.

    num_requests: that were sent, those that the workload cancels included. outcomes: how many ended in each way.
    errors: each error message with how many requests met it.
    wall_s: from the first send to the last request's end. output_tokens_per_s, input_tokens_per_s: of finished ones.
    good_requests_per_s, good_share: requests that met the class's objectives, over wall_s, and over all that were not
        cancelled on purpose; None without objectives.
    """

    num_requests: int
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    wall_s: float
    requests_per_s: float | None
    output_tokens_per_s: float | None
    input_tokens_per_s: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    icl_s: Distribution | None
    max_gap_s: Distribution | None
    e2e_s: Distribution | None
    good_requests_per_s: float | None
    good_share: float | None

    @property
    def num_finished(self) -> int:
        return self.outcomes.get(Outcome.FINISHED.value, 0)

    @property
    def num_errors(self) -> int:
        """That neither finished nor were cancelled on purpose."""
        return self.num_requests - self.num_finished - self.outcomes.get(Outcome.CANCELLED.value, 0)


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """What the server counted between the run's ends.

    queue_s: from the engine's taking a request to its first step, estimated from a histogram as Prometheus does.
    triton_queue_s: what requests spent in Triton's own queue before that, on average, in seconds; next to nothing in
        flight, while in the closed modes they wait there.
    """

    slot_utilisation: float | None
    mean_batch: float | None
    kv_waste: float | None
    kv_usage_mean: float | None
    kv_usage_max: float | None
    queue_s: Distribution | None
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int
    prefix_hit_rate: float | None
    triton_queue_s: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """all: every class together. server: None where its metrics could not be read."""

    all: ClassSummary
    classes: Mapping[str, ClassSummary]
    server: ServerSummary | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """What `to_json` wrote."""
        return cls(
            all=_class_summary(values["all"]),
            classes={name: _class_summary(one) for name, one in values["classes"].items()},
            server=None if values["server"] is None else ServerSummary(**_distributions(values["server"])),
        )


def summarise_requests(
    records: Sequence[RequestRecord], objectives: Mapping[str, Objectives]
) -> tuple[ClassSummary, dict[str, ClassSummary]]:
    """All requests together, and by class. objectives: by class; a class without any has no goodput."""
    measured = [record for record in records if not record.is_warm_up]
    names = sorted({record.request_class for record in measured})
    classes = {
        name: summarise_class([record for record in measured if record.request_class == name], objectives)
        for name in names
    }
    return summarise_class(measured, objectives), classes


def summarise_class(records: Sequence[RequestRecord], objectives: Mapping[str, Objectives]) -> ClassSummary:
    finished = [record for record in records if record.has_succeeded]
    judged = [record for record in records if record.outcome is not Outcome.CANCELLED]
    has_objectives = bool(judged) and all(record.request_class in objectives for record in judged)
    num_good = sum(objectives[record.request_class].are_met_by(record) for record in judged) if has_objectives else None
    wall_s = max(r.ended_s for r in records) - min(r.sent_s for r in records) if records else 0.0
    return ClassSummary(
        num_requests=len(records),
        outcomes=_counts(record.outcome.value for record in records),
        errors=_counts(record.error for record in records if record.error is not None),
        wall_s=wall_s,
        requests_per_s=_over(len(finished), wall_s),
        output_tokens_per_s=_over(sum(record.num_output_tokens for record in finished), wall_s),
        input_tokens_per_s=_over(sum(record.num_input_tokens for record in finished), wall_s),
        ttft_s=Distribution.of(record.ttft_s for record in finished),
        tpot_s=Distribution.of(record.tpot_s for record in finished),
        icl_s=Distribution.of(gap for record in finished for gap in record.gaps_s),
        max_gap_s=Distribution.of(record.max_gap_s for record in finished),
        e2e_s=Distribution.of(record.e2e_s for record in finished),
        good_requests_per_s=_over(num_good, wall_s),
        good_share=_over(num_good, len(judged)),
    )


def summarise_server(
    grown: EngineCounters,
    queue_s: Distribution | None = None,
    kv_usage: Sequence[float] = (),
    triton_queue_s: float | None = None,
) -> ServerSummary:
    """grown: how much the counters grew during the run. kv_usage: share of the blocks held, as sampled meanwhile."""
    return ServerSummary(
        slot_utilisation=grown.slot_utilisation,
        mean_batch=grown.mean_batch,
        kv_waste=grown.kv_waste,
        kv_usage_mean=sum(kv_usage) / len(kv_usage) if kv_usage else None,
        kv_usage_max=max(kv_usage, default=None),
        queue_s=queue_s,
        num_steps=int(grown.steps),
        num_preemptions=int(grown.preemptions),
        num_recomputed_tokens=int(grown.recomputed_tokens),
        prefix_hit_rate=grown.prefix_hit_rate,
        triton_queue_s=triton_queue_s,
    )


def _class_summary(values: Mapping[str, Any]) -> ClassSummary:
    return ClassSummary(**_distributions(values))


def _distributions(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Distribution(**value) if name.endswith("_s") and isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _counts(values: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _over(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole > 0 else None
