"""What the server counted during a measurement, from Triton's Prometheus endpoint.

Knows the names of Noria's counters and the text format; knows nothing of the requests that were sent.
Format: the Prometheus text exposition format 0.0.4.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from noria_bench.engine_counters import EngineCounters, metric_name
from noria_bench.histogram import Histogram
from noria_client.errors import INTERNAL, UNAVAILABLE, ServerError

HEARTBEAT = "noria_heartbeat_timestamp_seconds"
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\["\\n])*)"\s*(,|$)')
_SAMPLE = re.compile(rf'({_NAME})\s*(?:\{{((?:[^"}}]|"(?:[^"\\\n]|\\["\\n])*")*)\}})?\s*([^\s{{}}]+)(?:\s+(-?\d+))?\s*')
_ESCAPED = re.compile(r'\\(["\\n])')


def direct_opener() -> urllib.request.OpenerDirector:
    """A proxy that the environment names is not for the server under measurement."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """All samples of an exposition. Raises ValueError with the line that is not one."""
    lines = (line.strip() for line in text.splitlines())
    return [_parse_sample(line) for line in lines if line and not line.startswith("#")]


def _parse_sample(line: str) -> Sample:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"not a metric sample: {line!r}")
    name, labels, value, _timestamp = match.groups()
    try:
        return Sample(name, dict(_parse_labels(labels or "")), float(value))
    except ValueError:
        raise ValueError(f"not a metric sample: {line!r}") from None


def _parse_labels(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    # a comma after the last label is allowed
    while position < len(text.rstrip()):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"not a list of labels: {text!r}")
        yield match[1], _ESCAPED.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], match[2])
        position = match.end()


@dataclass(frozen=True)
class Exposition:
    """One model's samples of one scrape, summed over its versions and over labels that are not asked for.

    is_settled: False where they were to be read at rest and were not.
    """

    samples: tuple[Sample, ...]
    is_settled: bool = True

    def value(self, name: str) -> float:
        """0 for a series that is not there (yet)."""
        return sum(sample.value for sample in self.samples if sample.name == name)

    def has(self, name: str) -> bool:
        return any(sample.name == name for sample in self.samples)

    def counters(self) -> EngineCounters:
        return EngineCounters(**{f.name: self.value(metric_name(f.name)) for f in fields(EngineCounters)})

    def counts(self) -> list[Sample]:
        """All that only grows: the engine's counters and histograms."""
        endings = ("_total", "_bucket", "_sum", "_count")
        return [one for one in self.samples if one.name.startswith("noria_") and one.name.endswith(endings)]

    def histogram(self, name: str) -> Histogram:
        counts: dict[float, float] = {}
        for sample in self.samples:
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
        return Histogram(counts, self.value(f"{name}_sum"))


def exposition(text: str, model: str) -> Exposition:
    """Raises ValueError for what is not in the format."""
    return Exposition(tuple(sample for sample in parse_metrics(text) if sample.labels.get("model") == model))


def scrape(metrics_url: str, model: str) -> Exposition:
    """What the server says now. metrics_url: host:port of Triton's metrics endpoint. Raises ServerError without an
    answer that can be read."""
    address = f"http://{metrics_url.removeprefix('http://').rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with direct_opener().open(address, timeout=10) as response:
            return exposition(response.read().decode(), model)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerError(f"{address}: {error}", UNAVAILABLE) from None
    except ValueError as error:
        raise ServerError(f"{address}: {error}", INTERNAL) from None


def scrape_settled(metrics_url: str, model: str, interval_s: float = 0.3, timeout_s: float = 5.0) -> Exposition:
    """Of an idle engine. It publishes in batches, so they are read until what is published is newer than this call, and
    stands still."""
    asked_at = time.time()
    now = scrape(metrics_url, model)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(interval_s)
        earlier, now = now, scrape(metrics_url, model)
        is_fresh = not now.has(HEARTBEAT) or now.value(HEARTBEAT) > asked_at
        if is_fresh and now.counts() == earlier.counts():
            return now
    return replace(now, is_settled=False)
