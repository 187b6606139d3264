"""What an engine counted, on a server or in a simulation, and the ratios that are made of it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineCounters:
    """Counters since an engine's start, or how much they grew. The ratios are None where nothing was counted.

    steps: iterations of the engine.
    slot_steps, useful_slot_steps: slots offered, and slots that held an unfinished sequence, summed over steps.
    rows: rows computed, padding rows included, summed over steps.
    kv_allocated_slot_steps, kv_live_slot_steps: token slots of the cache that were allocated, and that held a token,
        summed over steps.
    recomputed_tokens: computed before a preemption, and again. computed_tokens: these included.
    prefix_tokens, prefix_hit_tokens: of sequences as they joined the batch, and how many of them the prefix cache held.
    prompt_tokens, generation_tokens: accepted, and drawn.
    requests_finished: answered. requests_failed: all others, of which some were rejected, expired or cancelled.
    """

    steps: float = 0.0
    slot_steps: float = 0.0
    useful_slot_steps: float = 0.0
    rows: float = 0.0
    kv_allocated_slot_steps: float = 0.0
    kv_live_slot_steps: float = 0.0
    preemptions: float = 0.0
    recomputed_tokens: float = 0.0
    computed_tokens: float = 0.0
    prefix_tokens: float = 0.0
    prefix_hit_tokens: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    requests_finished: float = 0.0
    requests_failed: float = 0.0
    requests_rejected: float = 0.0
    requests_expired: float = 0.0
    requests_cancelled: float = 0.0

    def __sub__(self, earlier: EngineCounters) -> EngineCounters:
        """Raises ValueError if a counter shrank: the server was restarted in between."""
        grown = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        for name, growth in grown.items():
            if growth < 0:
                raise ValueError(f"the counter {metric_name(name)} shrank by {-growth}: was the server restarted?")
        return EngineCounters(**grown)

    @property
    def slot_utilisation(self) -> float | None:
        return _ratio(self.useful_slot_steps, self.slot_steps)

    @property
    def mean_batch(self) -> float | None:
        return _ratio(self.rows, self.steps)

    @property
    def kv_waste(self) -> float | None:
        live = _ratio(self.kv_live_slot_steps, self.kv_allocated_slot_steps)
        return None if live is None else 1 - live

    @property
    def prefix_hit_rate(self) -> float | None:
        return _ratio(self.prefix_hit_tokens, self.prefix_tokens)


def metric_name(field_name: str) -> str:
    """Of a server's counter."""
    return f"noria_{field_name}_total"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
