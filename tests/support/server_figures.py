"""A running server's own figures, as its metrics endpoint tells them."""

from __future__ import annotations

import urllib.request

from noria.serving.server import RunningServer
from noria_bench.server_metrics import parse_metrics


def figures(server: RunningServer) -> dict[str, float]:
    """`noria_*` series by name, without the prefix, summed over their labels."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        samples = parse_metrics(response.read().decode())
    values: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith("noria_"):
            name = sample.name.removeprefix("noria_")
            values[name] = values.get(name, 0.0) + sample.value
    return values
