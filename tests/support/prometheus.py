"""The real promtool and prometheus over the files in docker/: runs them, and lists the queries that those files ask.

Where a tool is not installed, tests that need it are skipped; with NORIA_REQUIRE_TOOLS=1 they fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from noria.serving.machine import free_ports

DOCKER = Path(__file__).resolve().parents[2] / "docker"
PROMETHEUS = DOCKER / "prometheus"
RULES = PROMETHEUS / "rules.yaml"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "noria.json"
KUBERNETES = DOCKER / "kubernetes"
HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
# what Grafana would put in; windows as in a first look at a server that has just begun
VARIABLES = {"$__rate_interval": "1m", "${ttft_slo}": "2", "${tpot_slo}": "0.1", "$model": ".*", "$mode": ".*"}


@dataclass(frozen=True)
class Query:
    """name: where it is asked, for a message."""

    name: str
    expr: str


def tool(name: str, package: str = "prometheus") -> str:
    """The path of a program; else skips the test, or fails it if the tools are required."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian: apt-get install --no-install-recommends {package})"
        if os.environ.get("NORIA_REQUIRE_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def promtool(*arguments: str | Path) -> str:
    """What it prints. Fails the test with that if it is not content."""
    done = subprocess.run([tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the rows that head them."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def substituted(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, f"{expr} has a variable that the dashboard does not define"
    return expr


def dashboard_queries() -> list[Query]:
    """Of every panel, with the variables substituted."""
    return [
        Query(f"{panel['title']} / {target['legendFormat']}", substituted(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def series_names(expr: str) -> set[str]:
    """What a query reads: series of Noria and of Triton, and recorded ones."""
    return set(re.findall(r"\b(?:(?:instance|model|noria):\w+:\w+|noria_\w+|nv_\w+)", expr))


def autoscaler_queries() -> list[Query]:
    """Of KEDA's triggers and of the adapter's rules, as both ask them, but for the labels that only Kubernetes adds."""
    scaled_object = yaml.safe_load((KUBERNETES / "autoscaling" / "keda.yaml").read_text())
    adapter = yaml.safe_load((KUBERNETES / "autoscaling" / "prometheus-adapter.yaml").read_text())
    lists = yaml.safe_load(adapter["data"]["config.yaml"])
    queries = [Query(f"keda / {t['name']}", t["metadata"]["query"]) for t in scaled_object["spec"]["triggers"]]
    for rule in lists["rules"] + lists["externalRules"]:
        expr, series = rule["metricsQuery"], rule["seriesQuery"].partition("{")[0]
        for placeholder, value in {
            "Series": series,
            "LabelMatchers": 'namespace="noria"',
            "GroupBy": "instance",
        }.items():
            expr = expr.replace(f"<<.{placeholder}>>", value)
        queries.append(Query(f"adapter / {series}", expr))
    return [Query(query.name, re.sub(r'namespace="noria"(, )?', "", query.expr)) for query in queries]


class PrometheusServer:
    """docker/prometheus/prometheus.yaml on a free loopback port, scraping `target` each second. A context manager."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._url = f"http://{HOST}:{free_ports(HOST, (0, 0, 0))[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> PrometheusServer:
        command = [
            tool("prometheus"),
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait_for("up == 1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises AssertionError with Prometheus' message."""
        answer = self._get("query", query=expr)
        assert answer["status"] == "success", f"{answer.get('error')}: {expr}"
        assert not answer.get("warnings"), f"{answer.get('warnings')}: {expr}"
        return answer["data"]["result"]

    def rule_groups(self) -> list[dict[str, Any]]:
        """As loaded, with the health of each rule."""
        return self._get("rules")["data"]["groups"]

    def wait_for(self, expr: str, timeout_s: float = START_TIMEOUT_S) -> list[dict[str, Any]]:
        """The samples of a query once it has any."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if samples := self.query(expr):
                    return samples
            except (urllib.error.URLError, ConnectionError):
                pass
            if time.monotonic() > deadline:
                log = (self._folder / "prometheus.log").read_text()
                raise AssertionError(f"{expr} had no result within {timeout_s:.0f} s:\n{log[-2000:]}")
            time.sleep(0.2)

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with opener.open(url, timeout=10) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            # a bad query is a 400 whose body says why; until it has started Prometheus answers 503 in plain text
            if error.code == 503:
                raise urllib.error.URLError("not ready") from None
            return json.loads(error.read())


def without_samples(server: PrometheusServer, queries: Sequence[Query]) -> set[str]:
    """The names of the queries that find nothing, or only NaN."""
    return {query.name for query in queries if all(s["value"][1] == "NaN" for s in server.query(query.expr))}
