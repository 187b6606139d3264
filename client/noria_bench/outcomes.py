"""Tells why a server did not answer: a full queue and a passed deadline carry the same code, and texts of their own.

The texts are those of Noria's engine and of Triton's own queue; what is not known is a failure.
"""

from __future__ import annotations

from noria_bench.records import Outcome
from noria_client.errors import DEADLINE_EXCEEDED, UNAVAILABLE, ServerError

# of Noria (scheduling.waiting_queue, engine.engine) and of Triton's scheduler (dynamic_batch_scheduler)
_TEXTS = (
    ("queue is full", Outcome.REJECTED),
    ("xceeds maximum queue size", Outcome.REJECTED),
    ("timeout passed", Outcome.EXPIRED),
    ("equest timeout expired", Outcome.EXPIRED),
)
_CODES = {UNAVAILABLE: Outcome.FAILED, DEADLINE_EXCEEDED: Outcome.EXPIRED}


def outcome_of(error: ServerError) -> Outcome:
    """rejected, expired or failed."""
    for text, outcome in _TEXTS:
        if text in error.message:
            return outcome
    return _CODES.get(error.code, Outcome.FAILED)
