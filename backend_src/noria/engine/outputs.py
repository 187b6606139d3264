"""What the engine tells the outside of its requests and of itself. Plain data; `serving` makes tensors of it."""

from __future__ import annotations

from dataclasses import dataclass

from noria.errors import NoriaError
from noria.scheduler_output import SampledToken
from noria.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's gain of one request.

    text: what may be shown beyond earlier outputs; complete characters only, no part of a stop string.
    tokens: drawn in this step. Empty when the request ended without one (cancelled, out of time, failed).
    finish_reason: None while more is to come. error: set when the end is a failure.
    """

    request_id: int
    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    error: NoriaError | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges, after a step. The definitions of the derived figures:

    slot utilisation = num_useful_slot_steps / num_slot_steps, the share of slots offered (max_num_seqs per step) in
        which an unfinished sequence was computed;
    mean batch = num_rows / num_steps, rows computed per step, padding rows included;
    KV waste = 1 - num_kv_live_slot_steps / num_kv_allocated_slot_steps, the share of allocated token slots that hold no
        token of an unfinished sequence;
    prefix hit rate = num_prefix_hit_tokens / num_prefix_tokens, the share of the known tokens of sequences that joined
        the batch which was found in the cache.

    num_swapped_blocks: copied in either direction. num_recomputed_tokens: computed before a preemption, and again.
    num_rejected, num_expired, num_cancelled: the failed ones that met a full queue, a deadline, or whose client left.
    num_kv_blocks_held leaves out num_kv_blocks_cached, which nobody holds and anybody may take.
    """

    num_steps: int = 0
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
    num_finished: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_cancelled: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_held: int = 0
    num_kv_blocks_cached: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one turn of the engine hands to the writer. stats is None where the engine had no part in it."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats | None
