"""What a simulation writes down: each request's way through it, and what the engine did. Times are virtual seconds.

Knows nothing of what the numbers mean together: `summary` sums them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from noria.scheduler_output import SchedulerOutput
from noria_bench import latencies
from noria_bench.engine_counters import EngineCounters


class Outcome(str, Enum):
    """finished: it got all its tokens. rejected: it was refused when it came. deadline: its time ran out first."""

    FINISHED = "finished"
    REJECTED = "rejected"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """index: the request's place in what was simulated. replica: which one served it.

    sent_s: when it arrived. first_scheduled_s: when it first joined a batch; None if it never did.
    token_times_s: of each output token. ended_s: when its outcome was known. error: None if it finished.
    num_input_tokens: the prompt's.
    Latencies as in `noria_bench.latencies`.
    """

    index: int
    replica: int
    outcome: Outcome
    sent_s: float
    first_scheduled_s: float | None
    token_times_s: tuple[float, ...]
    ended_s: float
    num_input_tokens: int
    num_preemptions: int = 0
    user: str = ""
    priority: int = 0
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def queue_s(self) -> float | None:
        """From its arrival to the start of the first step that it is in."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.sent_s

    @property
    def has_succeeded(self) -> bool:
        return self.outcome is Outcome.FINISHED

    @property
    def ttft_s(self) -> float | None:
        return latencies.ttft(self.sent_s, self.token_times_s)

    @property
    def e2e_s(self) -> float | None:
        return latencies.e2e(self.sent_s, self.token_times_s)

    @property
    def tpot_s(self) -> float | None:
        return latencies.tpot(self.token_times_s, self.num_output_tokens)

    @property
    def gaps_s(self) -> list[float]:
        return latencies.gaps(self.token_times_s)

    @property
    def max_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)


@dataclass(slots=True)
class StepCounters:
    """Sums over steps, as the engine counts them for its metrics.

    slot_steps, useful_slot_steps: slots offered, and rows that are no padding. rows: all rows.
    kv_allocated_slot_steps, kv_live_slot_steps: token slots of the cache that were allocated, and that held a token.
    prefix_tokens, prefix_hit_tokens: known tokens of sequences that joined, and those of them found in the cache.
    recomputed_tokens: computed twice because of a preemption. computed_tokens: without those of padding rows.
    busy_s: time spent in steps.
    """

    steps: int = 0
    slot_steps: int = 0
    useful_slot_steps: int = 0
    rows: int = 0
    kv_allocated_slot_steps: int = 0
    kv_live_slot_steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_tokens: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0

    def count(self, output: SchedulerOutput, seconds: float, block_size: int) -> None:
        num_padding_rows = 0
        num_tokens = 0
        for row in output.rows:
            if row.is_padding:
                num_padding_rows += 1
            else:
                num_tokens += len(row.token_ids)
        self.steps += 1
        self.slot_steps += output.num_slots
        self.useful_slot_steps += len(output.rows) - num_padding_rows
        self.rows += len(output.rows)
        self.kv_allocated_slot_steps += output.num_allocated_blocks * block_size
        self.kv_live_slot_steps += output.num_live_kv_tokens
        self.computed_tokens += num_tokens
        self.preemptions += len(output.preempted_request_ids)
        self.recomputed_tokens += output.num_lost_tokens
        self.prefix_tokens += output.num_prefix_tokens
        self.prefix_hit_tokens += output.num_prefix_hit_tokens
        self.busy_s += seconds

    def __add__(self, other: StepCounters) -> StepCounters:
        return StepCounters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def totals(self) -> EngineCounters:
        """As a server would have counted them, for the ratios."""
        return EngineCounters(**{f.name: getattr(self, f.name) for f in fields(self) if f.name != "busy_s"})
