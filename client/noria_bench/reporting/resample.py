"""Latencies of requests drawn again: what their percentiles could as well have been. Knows nothing of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from noria_bench.records import RequestRecord
from noria_bench.reporting.intervals import Estimate, bootstrap

# values on one side; with more of them fewer draws, so that it takes seconds
_MANY_VALUES = 50_000
_NUM_DRAWS, _NUM_DRAWS_OF_MANY = 1000, 200
Values = Iterable[float | None]


class Resample:
    """Finished requests of two sides, to be drawn with replacement.

    is_paired: draw the same ones on both sides, told by their index; they are not paired where that is ambiguous. A
    request keeps its gaps together, as they are not independent.
    """

    def __init__(self, base: Sequence[RequestRecord], other: Sequence[RequestRecord], is_paired: bool) -> None:
        self._sides = [[record for record in side if record.has_succeeded] for side in (base, other)]
        indices = [{record.index: record for record in side} for side in self._sides]
        common = sorted(indices[0].keys() & indices[1].keys())
        # an index that comes twice, from two repeats, tells no request
        is_unique = all(len(index) == len(side) for index, side in zip(indices, self._sides, strict=True))
        self._is_paired = is_paired and is_unique and bool(common)
        if self._is_paired:
            self._sides = [[index[one] for one in common] for index in indices]

    @property
    def has_records(self) -> bool:
        return all(self._sides)

    @property
    def method(self) -> str:
        if self._is_paired:
            return f"bootstrap, {len(self._sides[0])} paired requests"
        return f"bootstrap, {len(self._sides[0])} and {len(self._sides[1])} requests"

    def ratio(
        self, accessor: Callable[[RequestRecord], Values], percentile: float
    ) -> tuple[float, float, Estimate] | None:
        """The percentile over all requests of either side, and other over base; None where one has none above 0."""
        samples = [_Sample([accessor(record) for record in side]) for side in self._sides]
        base, other = (sample.percentile(percentile) for sample in samples)
        value = _over(other, base)
        if value is None or base is None or other is None:
            return None

        def draw(rng: np.random.Generator) -> float | None:
            counts = [_drawn(rng, len(side)) for side in self._sides]
            if self._is_paired:
                counts[1] = counts[0]
            return _over(samples[1].percentile(percentile, counts[1]), samples[0].percentile(percentile, counts[0]))

        is_many = max(sample.num_values for sample in samples) > _MANY_VALUES
        return base, other, bootstrap(draw, value, _NUM_DRAWS_OF_MANY if is_many else _NUM_DRAWS, seed=0)


class _Sample:
    """Values of requests, in order, each with the place of its request."""

    def __init__(self, values: Sequence[Values]) -> None:
        pairs = [(value, place) for place, of_one in enumerate(values) for value in of_one if value is not None]
        pairs.sort()
        self._values = np.asarray([value for value, _ in pairs], dtype=np.float64)
        self._places = np.asarray([place for _, place in pairs], dtype=np.int64)

    @property
    def num_values(self) -> int:
        return len(self._values)

    def percentile(self, percentile: float, counts: NDArray[np.int64] | None = None) -> float | None:
        """counts: how often each request counts; None once."""
        values = self._values if counts is None else np.repeat(self._values, counts[self._places])
        if not len(values):
            return None
        # as np.percentile's linear method, which would put in order what is in order
        place = (len(values) - 1) * percentile / 100
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return float(values[low] + (place - low) * (values[high] - values[low]))


def _drawn(rng: np.random.Generator, num: int) -> NDArray[np.int64]:
    return np.bincount(rng.integers(0, num, size=num), minlength=num)


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole is not None and part > 0 and whole > 0 else None
