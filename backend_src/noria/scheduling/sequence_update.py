"""What the scheduler says of one sequence after a step."""

from __future__ import annotations

from dataclasses import dataclass

from noria.scheduler_output import SampledToken
from noria.sequence import FinishReason


# not frozen for the same reason as ScheduledSequence
@dataclass(slots=True)
class SequenceUpdate:
    """What a step gave one sequence. `token` is None when it failed; then `error` says why."""

    request_id: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    error: str | None = None
