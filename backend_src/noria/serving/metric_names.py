"""Every series of ours on Triton's metrics endpoint, with its labels. Knows nothing of Triton; see `metric_tables`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from noria.serving import metric_tables as tables
from noria.serving.metric_tables import ReadLevel, ReadStats, ReadTimings


@dataclass(frozen=True, slots=True)
class Series:
    """One counter or gauge. read: its value."""

    name: str
    help: str
    is_counter: bool
    labels: Mapping[str, str]
    read: ReadStats


@dataclass(frozen=True, slots=True)
class Distribution:
    """One histogram over requests that have ended. read: what one of them adds, None if nothing. buckets: upper bounds.

    level: the only priority level whose requests it observes; None is all.
    """

    name: str
    help: str
    labels: Mapping[str, str]
    buckets: tuple[float, ...]
    read: ReadTimings
    level: int | None = None


@dataclass(frozen=True, slots=True)
class MetricNames:
    """What one loaded model publishes. mode: static, dynamic or inflight. levels: of priority, as in EngineStats."""

    model: str
    version: str
    mode: str
    levels: tuple[int, ...]

    def series(self) -> Iterator[Series]:
        yield from _plain(self._labels, tables.COUNTERS, tables.GAUGES)
        for index, level in enumerate(self.levels):
            counters, gauges = (_of_level(table, index) for table in (tables.LEVEL_COUNTERS, tables.LEVEL_GAUGES))
            yield from _plain(self._labels | {"class": str(level)}, counters, gauges)
        yield from self._vllm_series()
        yield from self._trtllm_series()

    def distributions(self) -> Iterator[Distribution]:
        for name, (text, buckets, read) in tables.DISTRIBUTIONS.items():
            for level in self.levels:
                yield Distribution(name, text, self._labels | {"class": str(level)}, buckets, read, level)
        for name, twin in tables.VLLM_DISTRIBUTIONS.items():
            _, buckets, read = tables.DISTRIBUTIONS[twin]
            yield Distribution(name, f"As {twin}", {"model_name": self.model}, buckets, read)

    @property
    def _labels(self) -> dict[str, str]:
        return {"model": self.model, "version": self.version, "mode": self.mode}

    def _vllm_series(self) -> Iterator[Series]:
        labels = {"model_name": self.model}
        yield from _plain(labels, tables.VLLM_COUNTERS, tables.VLLM_GAUGES)
        for reason, read in tables.VLLM_ENDS.items():
            own = labels | {"finished_reason": reason}
            yield Series("vllm:request_success_total", "Sequences taken in that have ended, by why", True, own, read)

    def _trtllm_series(self) -> Iterator[Series]:
        labels = {"model": self.model, "version": self.version}
        by_mode = tables.TRTLLM_INFLIGHT if self.mode == "inflight" else tables.TRTLLM_CLOSED
        for name, (text, key, reads) in (tables.TRTLLM_GAUGES | by_mode).items():
            for value, read in reads.items():
                yield Series(name, text, False, labels | {key: value}, read)


def _plain(
    labels: Mapping[str, str],
    counters: Mapping[str, tuple[str, ReadStats]],
    gauges: Mapping[str, tuple[str, ReadStats]],
) -> Iterator[Series]:
    for is_counter, table in ((True, counters), (False, gauges)):
        for name, (text, read) in table.items():
            yield Series(name, text, is_counter, labels, read)


def _of_level(table: Mapping[str, tuple[str, ReadLevel]], index: int) -> dict[str, tuple[str, ReadStats]]:
    """The same of one level, by its place in EngineStats.levels."""

    def reader(read: ReadLevel) -> ReadStats:
        return lambda stats: read(stats.levels[index])

    return {name: (text, reader(read)) for name, (text, read) in table.items()}
