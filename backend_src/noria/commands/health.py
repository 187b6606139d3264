"""`noria health`: whether the engine's thread still turns, by the heartbeat among the metrics. For exec probes.

Triton's own readiness says nothing of that: it stays ready while a model's process hangs or is dead.
"""

from __future__ import annotations

import argparse
import http.client
import time
import urllib.error
from collections.abc import Sequence
from typing import Any

from noria.commands.common import say
from noria_bench.server_metrics import Sample, direct_opener, parse_metrics

HEARTBEAT = "noria_heartbeat_timestamp_seconds"
TIMEOUT_S = 5.0
# between the clocks of two machines
MAX_CLOCK_SKEW_S = 60.0


def add_health(subparsers: Any) -> None:
    """subparsers: what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "health",
        help="exit with 0 if a server's engine is alive, for exec probes",
        description="Exits with 0 when every loaded engine's heartbeat is fresh, else with 1 and a reason.",
    )
    parser.add_argument(
        "--metrics-url",
        default="localhost:8002",
        metavar="HOST:PORT",
        help="of Triton's metrics endpoint (default: localhost:8002)",
    )
    parser.add_argument(
        "--max-age",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of the heartbeat; longer than the longest step, within which there is none (default: 30)",
    )
    parser.set_defaults(run=_run_health)


def _run_health(args: argparse.Namespace) -> int:
    fault = find_fault(args.metrics_url, args.max_age)
    if fault is not None:
        say(f"not healthy: {fault}")
        return 1
    return 0


def find_fault(metrics_url: str, max_age_s: float) -> str | None:
    """What is wrong with the server, in words; None if nothing is."""
    address = f"http://{metrics_url.removeprefix('http://').rstrip('/').removesuffix('/metrics')}/metrics"
    try:
        with direct_opener().open(address, timeout=TIMEOUT_S) as response:
            samples = parse_metrics(response.read().decode())
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return f"{address}: {error}"
    return _stale_heartbeat(samples, time.time(), max_age_s)


def _stale_heartbeat(samples: Sequence[Sample], now: float, max_age_s: float) -> str | None:
    # a model that was unloaded leaves a heartbeat of 0 behind
    heartbeats = [sample for sample in samples if sample.name == HEARTBEAT and sample.value]
    if not heartbeats:
        return f"no model is loaded: there is no {HEARTBEAT}"
    oldest = min(heartbeats, key=lambda sample: sample.value)
    age_s = now - oldest.value
    if -MAX_CLOCK_SKEW_S <= age_s <= max_age_s:
        return None
    return f"the engine of model {oldest.labels.get('model', '?')} last turned {age_s:.1f} s ago, not {max_age_s:g} s"
