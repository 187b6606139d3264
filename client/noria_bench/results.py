"""A result as a directory: result.json, and for each run its requests and its server's series as JSONL.

    RESULT/result.json                  what was asked, where, what came out; see `Result`
    RESULT/<run>.requests.jsonl.gz      a `RequestRecord` a line: every token's time stamp
    RESULT/<run>.series.jsonl.gz        a `SeriesPoint` a line: the server's gauges and counters as time went by

Whoever reads a result needs nothing else: neither the server nor the workload's file.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from noria_bench.errors import BenchError
from noria_bench.records import RequestRecord
from noria_bench.summary import Summary

FORMAT = "noria-bench-1"
FILE = "result.json"


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Seconds of the load generator's clock, and the server's gauges then.

    num_running: sequences. num_waiting: in the engine's queue and in Triton's before it. kv_usage: share of the
    blocks held. generation_tokens: counted so far.
    """

    time_s: float
    num_running: float
    num_waiting: float
    kv_usage: float
    generation_tokens: float
    slot_steps: float = 0.0
    useful_slot_steps: float = 0.0


@dataclass(frozen=True, slots=True)
class GeneratorHealth:
    """Whether the load generator kept up; times in seconds.

    lateness: of sends behind their due time. loop_lag: of its event loop's timer behind its own. cpu_share: of one core
    that its process took. niceness: its priority, as `nice` counts. problems: why the run must not be believed; empty
    when it may.
    """

    lateness_p99_s: float | None
    lateness_max_s: float | None
    loop_lag_p99_s: float
    cpu_share: float
    problems: tuple[str, ...] = ()
    niceness: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One mode or configuration under the workload, once.

    name: unique in the result and part of file names, such as `inflight-rate0.4-2`. label: what is compared: the mode,
    or the name of a configuration. repeat: from 0. seed: of the workload's lengths, prompts and arrivals.
    rate: requests a second of an open loop; concurrency: of a closed one; both None where all come at once, or as in a
    trace.
    engine: the configuration as loaded. environment: of this run, such as the neighbours' load.
    workload_sha256: of all that was sent, and when. mismatches: where the client's ledger and the server's counters
    disagree.
    """

    name: str
    label: str
    repeat: int
    seed: int
    rate: float | None
    concurrency: int | None
    started_at: str
    summary: Summary
    generator: GeneratorHealth
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    workload_sha256: str = ""
    mismatches: tuple[str, ...] = ()
    is_interrupted: bool = False

    @property
    def is_valid(self) -> bool:
        return not self.generator.problems and not self.is_interrupted

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.summary.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Run:
        health = dict(values["generator"])
        return cls(
            **dict(values)
            | {
                "summary": Summary.from_json(values["summary"]),
                "generator": GeneratorHealth(**health | {"problems": tuple(health["problems"])}),
                "mismatches": tuple(values["mismatches"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a sweep found for one label: the highest rate that keeps the SLO, in requests a second.

    slo: as text, of each class. rate: None when the lowest rate tried broke it in some repeat. low, high: bounds of a
    95 % interval over the repeats; of a single one, the rates between which it breaks. is_bounded: whether a
    rate was found that breaks the SLO; otherwise the capacity is at least `rate`. broken_by: the objective that breaks
    first above it.
    """

    label: str
    slo: str
    rate: float | None
    low: float | None
    high: float | None
    is_bounded: bool
    broken_by: str | None
    num_runs: int
    num_repeats: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """workload: as in its file, with `sha256` of what is sent. arguments: enough to run the same again.

    slo: by request class, as text. environment: machine, versions, hashes; see `environment`.
    """

    command: Sequence[str]
    created_at: str
    arguments: Mapping[str, Any]
    workload: Mapping[str, Any]
    slo: Mapping[str, str]
    environment: Mapping[str, Any]
    runs: Sequence[Run] = ()
    capacities: Sequence[Capacity] = ()

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("created_at", "arguments", "workload", "slo", "environment")}
        return {
            "format": FORMAT,
            "command": list(self.command),
            **own,
            "runs": [run.to_json() for run in self.runs],
            "capacities": [asdict(capacity) for capacity in self.capacities],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        """Raises BenchError for what `to_json` cannot have written."""
        if values.get("format") != FORMAT:
            raise BenchError(f"not a result of noria bench: format must be {FORMAT!r}, not {values.get('format')!r}")
        own = {name: value for name, value in values.items() if name != "format"}
        try:
            return cls(
                **own
                | {
                    "runs": [Run.from_json(run) for run in own["runs"]],
                    "capacities": [Capacity(**capacity) for capacity in own["capacities"]],
                }
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BenchError(f"not a result of noria bench: {error!r}") from None


def write_result(folder: Path, result: Result) -> None:
    """result.json, all at once: an interrupted write leaves the one before."""
    temporary = folder / f".{FILE}"
    temporary.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def read_result(path: Path) -> Result:
    """path: a result's directory, or its result.json. Raises BenchError."""
    file = path / FILE if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BenchError(f"cannot read {file}: {error}") from None
    if not isinstance(values, dict):
        raise BenchError(f"not a result of noria bench: {file} holds no JSON object")
    return Result.from_json(values)


def requests_path(folder: Path, run_name: str) -> Path:
    return folder / f"{run_name}.requests.jsonl.gz"


def series_path(folder: Path, run_name: str) -> Path:
    return folder / f"{run_name}.series.jsonl.gz"


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    # no name and no time in the archive's head: equal lines give equal files
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    temporary.replace(path)


def read_records(folder: Path, run_name: str) -> list[RequestRecord]:
    """Empty where the file is not there: small results are kept without. Raises BenchError for a damaged one."""
    return [RequestRecord.from_json(line) for line in _read_lines(requests_path(folder, run_name))]


def read_series(folder: Path, run_name: str) -> list[SeriesPoint]:
    try:
        return [SeriesPoint(**line) for line in _read_lines(series_path(folder, run_name))]
    except TypeError as error:
        raise BenchError(f"{series_path(folder, run_name)}: {error}") from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise BenchError(f"cannot read {path}: {error}") from None
