"""What the server counted during a measurement, from Triton's Prometheus endpoint.

Knows the names of Noria's counters and the text format; knows nothing of the requests that were sent.
Format: the Prometheus text exposition format 0.0.4.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from noria_bench.engine_counters import EngineCounters, metric_name
from noria_client.errors import UNAVAILABLE, ServerError

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\["\\n])*)"\s*(,|$)')
_SAMPLE = re.compile(rf'({_NAME})\s*(?:\{{((?:[^"}}]|"(?:[^"\\\n]|\\["\\n])*")*)\}})?\s*([^\s{{}}]+)(?:\s+(-?\d+))?\s*')
_ESCAPED = re.compile(r'\\(["\\n])')


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


def engine_counters(samples: list[Sample], model: str) -> EngineCounters:
    """One model's counters, summed over its versions; 0 for one that is not there (yet)."""

    def total(field_name: str) -> float:
        name = metric_name(field_name)
        return sum(sample.value for sample in samples if sample.name == name and sample.labels.get("model") == model)

    return EngineCounters(**{f.name: total(f.name) for f in fields(EngineCounters)})


def scrape(metrics_url: str, model: str) -> EngineCounters:
    """The counters now. metrics_url: host:port of Triton's metrics endpoint. Raises ServerError without an answer."""
    address = f"http://{metrics_url.removeprefix('http://').rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise ServerError(f"{address}: {error}", UNAVAILABLE) from None
    return engine_counters(parse_metrics(text), model)


def scrape_settled(metrics_url: str, model: str, interval_s: float = 0.3, timeout_s: float = 5.0) -> EngineCounters:
    """The counters of an idle engine. It publishes them in batches, so they are read until they stand still."""
    counters = scrape(metrics_url, model)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(interval_s)
        earlier, counters = counters, scrape(metrics_url, model)
        if counters == earlier:
            break
    return counters
