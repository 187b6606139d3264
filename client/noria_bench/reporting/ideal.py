"""What the output lengths alone say of closed batches: how much of their slots is padding, and what in-flight gains.

A closed batch of B runs for as many steps as its longest sequence has tokens, and every slot is offered in each of
them. So the useful share is E[L] / E[max of B], and in-flight batching, which leaves no slot idle while anything waits,
can be E[max of B] / E[L] times as fast, where a step takes the same time for any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noria_bench.records import RequestRecord
from noria_bench.reporting.loaded import Setting, Source, num_slots

NUM_SHUFFLES = 1000


@dataclass(frozen=True, slots=True)
class Ideal:
    """ratio: in-flight over closed batches. low, high: where 95 % of the orders of arrival lie. cv: of the lengths."""

    num_slots: int
    num_requests: int
    cv: float
    ratio: float
    low: float
    high: float

    @property
    def closed_utilisation(self) -> float:
        return 1 / self.ratio


def ideal_of(lengths: Sequence[int], num_slots: int, seed: int = 0) -> Ideal | None:
    """lengths: output tokens of the requests. They are put into batches of num_slots in NUM_SHUFFLES random orders.

    Requests that do not fill a last batch are left out of that order, so that what is compared is full batches. None
    where no request has tokens. Fewer requests than slots make one batch of them.
    """
    known = np.asarray([length for length in lengths if length > 0], dtype=np.float64)
    if not len(known):
        return None
    size = min(num_slots, len(known))
    num_batches = len(known) // size
    rng = np.random.default_rng(seed)
    longest = np.empty(NUM_SHUFFLES)
    for index in range(NUM_SHUFFLES):
        batches = rng.permutation(known)[: num_batches * size].reshape(num_batches, size)
        longest[index] = batches.max(axis=1).mean()
    ratios = longest / known.mean()
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ideal(
        num_slots=size,
        num_requests=len(known),
        cv=float(known.std() / known.mean()),
        ratio=float(ratios.mean()),
        low=float(low),
        high=float(high),
    )


def ideal_of_setting(source: Source, setting: Setting) -> Ideal | None:
    """Of its counted runs' finished requests; None without records, or without a number of slots."""
    slots = next((slots for run in setting.counted if (slots := num_slots(run)) is not None), None)
    records: list[RequestRecord] = [record for run in setting.counted for record in source.records(run)]
    if slots is None:
        return None
    return ideal_of([record.num_output_tokens for record in records if record.has_succeeded], slots)
