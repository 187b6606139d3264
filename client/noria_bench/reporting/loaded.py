"""Results as a report reads them: runs that differ only in their repeat together, requests and series when needed.

Knows nothing of how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from noria_bench.errors import BenchError
from noria_bench.records import RequestRecord
from noria_bench.reporting.figures import Figure
from noria_bench.reporting.intervals import Estimate, mean_of
from noria_bench.reporting.text import label_name, plain
from noria_bench.results import FILE, Result, Run, SeriesPoint, read_records, read_result, read_series

SLOTS_PICTURE = "slots.svg"
CLOSED_MODES = ("static", "dynamic")


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """rate: requests a second; concurrency: requests under way; neither where the workload's own arrivals are sent."""

    rate: float = 0.0
    concurrency: int = 0

    @property
    def value(self) -> float:
        return self.rate or self.concurrency

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:g}/s"
        return f"{self.concurrency} at a time" if self.concurrency else "the workload's own arrivals"


@dataclass(frozen=True, slots=True)
class Setting:
    """One label under one load: its repeats."""

    label: str
    load: Load
    runs: tuple[Run, ...]

    @property
    def is_valid(self) -> bool:
        return any(run.is_valid for run in self.runs)

    @property
    def counted(self) -> tuple[Run, ...]:
        """The valid runs; all of them where none is."""
        return tuple(run for run in self.runs if run.is_valid) or self.runs

    def estimate(self, figure: Figure) -> Estimate | None:
        """Mean over the counted runs that have the figure, with Student's interval."""
        read = (figure.read(run, run.summary.all) for run in self.counted)
        values = [value for value in read if value is not None and math.isfinite(value)]
        return mean_of(values) if values else None

    def mean(self, figure: Figure) -> float | None:
        estimate = self.estimate(figure)
        return None if estimate is None else estimate.value


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """By load, and within one in the order in which the labels first came."""
    labels = list(dict.fromkeys(run.label for run in runs))
    groups: dict[tuple[Load, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((load_of(run), labels.index(run.label)), []).append(run)
    return [
        Setting(labels[index], load, tuple(sorted(group, key=lambda run: run.repeat)))
        for (load, index), group in sorted(groups.items(), key=lambda item: item[0])
    ]


def load_of(run: Run) -> Load:
    return Load(run.rate or 0.0, run.concurrency or 0)


def num_slots(run: Run) -> int | None:
    """Sequences that the engine computes in a step at most, None if neither the engine's settings nor Triton's say."""
    # in the closed modes Triton forms the batches
    from_triton = _triton_config(run).get("max_batch_size") if is_closed(run) else None
    for value in (from_triton, run.engine.get("max_num_seqs")):
        if isinstance(value, int) and value > 0:
            return value
    return None


def is_closed(run: Run) -> bool:
    """Whether its batches end with their longest sequence."""
    parameter = as_mapping(as_mapping(_triton_config(run).get("parameters")).get("batching_mode")).get("string_value")
    return (run.engine.get("batching_mode") or parameter or run.label) in CLOSED_MODES


def _triton_config(run: Run) -> Mapping[str, Any]:
    """The model's, as Triton loaded it."""
    return as_mapping(run.environment.get("config"))


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Itself, or an empty one where it is something else."""
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, eq=False)
class Source:
    """A result that was read. name: unique in a report. folder: None for one that lies in no folder."""

    name: str
    result: Result
    folder: Path | None = None
    _records: dict[str, list[RequestRecord]] = field(default_factory=dict, repr=False)

    @cached_property
    def settings(self) -> list[Setting]:
        return settings_of(self.result.runs)

    @property
    def workload_hash(self) -> str | None:
        value = self.result.workload.get("sha256")
        return value if isinstance(value, str) else None

    @property
    def output_cv(self) -> float | None:
        """Of the output lengths, as the workload says."""
        value = self.result.workload.get("output_cv")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def records(self, run: Run) -> list[RequestRecord]:
        """Those after warm-up; empty where the result was kept without. Raises BenchError for a damaged file."""
        if run.name not in self._records:
            read = [] if self.folder is None else read_records(self.folder, run.name)
            self._records[run.name] = [record for record in read if not record.is_warm_up]
        return self._records[run.name]

    def series(self, run: Run) -> list[SeriesPoint]:
        return [] if self.folder is None else read_series(self.folder, run.name)

    def slots_picture(self) -> bytes | None:
        try:
            return None if self.folder is None else (self.folder / SLOTS_PICTURE).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BenchError(f"cannot read {self.folder}/{SLOTS_PICTURE}: {error.strerror}") from None


def load_sources(paths: Sequence[Path]) -> list[Source]:
    """paths: results' directories, or their result.json. Raises BenchError, also for a result without runs."""
    names: dict[str, int] = {}
    sources = []
    for path in paths:
        result = read_result(path)
        folder = path if path.is_dir() else path.parent
        if not result.runs:
            raise BenchError(f"{path}: holds no runs, so there is nothing to report")
        name = plain(path.stem if path.is_file() and path.name != FILE else folder.resolve().name, 40)
        names[name] = names.get(name, 0) + 1
        sources.append(Source(name if names[name] == 1 else f"{name} ({names[name]})", result, folder))
    return sources


@dataclass(frozen=True)
class Family:
    """Results of the same workload, which may be drawn on the same axes."""

    sources: tuple[Source, ...]

    @property
    def pairs(self) -> list[tuple[Source, Setting]]:
        return [(source, setting) for source in self.sources for setting in source.settings]

    def name(self, source: Source, setting: Setting) -> str:
        """Of a label, which several results may have."""
        name = label_name(setting.label)
        return name if len(self.sources) == 1 else f"{source.name}: {name}"

    @property
    def loads(self) -> list[Load]:
        return sorted({setting.load for _, setting in self.pairs})

    def shown_loads(self, max_loads: int) -> list[Load]:
        """Some of the loads that most labels ran under, the lowest and the highest among them; of one, the highest."""
        shares: dict[Load, int] = {}
        for _, setting in self.pairs:
            shares[setting.load] = shares.get(setting.load, 0) + setting.is_valid
        common = [load for load in self.loads if shares[load] == max(shares.values())]
        if max_loads == 1 or len(common) == 1:
            return common[-1:]
        num = min(max_loads, len(common))
        return [common[round(place * (len(common) - 1) / (num - 1))] for place in range(num)]

    def at(self, load: Load) -> list[tuple[Source, Setting]]:
        return [(source, setting) for source, setting in self.pairs if setting.load == load]


def families_of(sources: Sequence[Source]) -> list[Family]:
    """One without a hash is compared with none."""
    groups: dict[object, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.workload_hash or id(source), []).append(source)
    return [Family(tuple(group)) for group in groups.values()]
