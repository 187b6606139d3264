"""What the engine tells the outside of its requests and of itself: plain data for tensors and for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from noria.engine.request_timings import RequestTimings
from noria.errors import NoriaError
from noria.scheduler_output import SampledToken
from noria.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's gain of one request.

    text: what may be shown beyond earlier outputs; complete characters only, no part of a stop string.
    tokens: drawn in this step. Empty when the request ended without one (cancelled, out of time, failed).
    finish_reason: None while more is to come. error: set when the end is a failure.
    timings: with the last output, of a request that was valid.
    """

    request_id: int
    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    error: NoriaError | None = None
    timings: RequestTimings | None = None


# this and the next are made after every step; not frozen for the same reason as ScheduledSequence
@dataclass(slots=True)
class LevelStats:
    """Sequences of one priority level: those that wait, and counters of those that have ended.

    num_stopped: by a stop token or string. num_at_length: at max_tokens. num_failed: all others.
    num_rejected, num_expired, num_cancelled: the failed ones that met a full queue, a deadline, or whose client left.
    """

    level: int
    num_waiting: int = 0
    num_stopped: int = 0
    num_at_length: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_cancelled: int = 0

    @property
    def num_finished(self) -> int:
        return self.num_stopped + self.num_at_length


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges, after a step. The definitions of the derived figures:

    slot utilisation = num_useful_slot_steps / num_slot_steps, the share of slots offered (max_num_seqs per step) in
        which an unfinished sequence was computed;
    mean batch = num_rows / num_steps, rows computed per step, padding rows included;
    KV waste = 1 - num_kv_live_slot_steps / num_kv_allocated_slot_steps, the share of allocated token slots that hold no
        token of an unfinished sequence;
    KV usage = num_kv_blocks_held / num_kv_blocks;
    prefix hit rate = num_prefix_hit_tokens / num_prefix_tokens, the share of the known tokens of sequences that joined
        the batch which was found in the cache.

    Counters
    step_seconds: time spent in steps, scheduling and text included. Where a step is launched while the one before it is
        computed, what the two share counts once: divided by num_steps it is what a step takes.
    num_swapped_blocks: copied in either direction. num_recomputed_tokens: computed before a preemption, and again.
    num_invalid: requests that the scheduler could never serve; those are in no level's counters.

    Gauges
    max_num_seqs: slots. block_size: tokens in a block.
    num_running_tokens: of the sequences in the batch, in the cache. num_waiting_tokens: of those that wait, prompts and
        what was generated before a preemption.
    num_kv_blocks_held leaves out num_kv_blocks_cached, which nobody holds and anybody may take.
    num_context_requests, num_context_tokens: rows of the last step that computed more than the last token drawn, and
        their tokens. num_decode_requests: its other rows, of one token each. num_empty_slots: slots in which it
        computed no unfinished sequence. All four are 0 when nothing runs.
    heartbeat_s: when this was taken on the engine's thread, Unix time.
    """

    num_steps: int = 0
    step_seconds: float = 0.0
    num_slot_steps: int = 0
    num_useful_slot_steps: int = 0
    num_rows: int = 0
    num_kv_allocated_slot_steps: int = 0
    num_kv_live_slot_steps: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    num_swapped_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_invalid: int = 0
    max_num_seqs: int = 0
    num_running: int = 0
    num_running_tokens: int = 0
    num_waiting_tokens: int = 0
    num_paused: int = 0
    block_size: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_held: int = 0
    num_kv_blocks_cached: int = 0
    num_context_requests: int = 0
    num_context_tokens: int = 0
    num_decode_requests: int = 0
    num_empty_slots: int = 0
    heartbeat_s: float = 0.0
    levels: tuple[LevelStats, ...] = ()

    @property
    def num_waiting(self) -> int:
        return sum(level.num_waiting for level in self.levels)

    @property
    def num_finished(self) -> int:
        return sum(level.num_finished for level in self.levels)

    @property
    def num_failed(self) -> int:
        return sum(level.num_failed for level in self.levels)

    @property
    def num_rejected(self) -> int:
        return sum(level.num_rejected for level in self.levels)

    @property
    def num_expired(self) -> int:
        return sum(level.num_expired for level in self.levels)

    @property
    def num_cancelled(self) -> int:
        return sum(level.num_cancelled for level in self.levels)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one turn of the engine hands to the writer and to the metrics. stats is None where it had no part in it."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats | None
