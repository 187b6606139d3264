"""The Kubernetes manifests: by the API's own schemas, against each other, and against the code that they start.

kubernetes-validate ships the schemas. It has none for custom resources: KEDA's ScaledObject, the Prometheus Operator's
PodMonitor and the adapter's rules are held against the field names of their documentation, written down here.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from noria.cli import _parser as cli_parser
from noria.config_sources import ENVIRONMENT_VARIABLE, load_engine_config
from noria.serving.machine import MIN_SHM_BYTES
from noria.serving.server import READY_TIMEOUT_S, STOP_TIMEOUT_S, ServerOptions, check_mode, default_repository
from support.prometheus import DOCKER, HOST, KUBERNETES, promtool, rules, tool

MANIFESTS = {
    (document["kind"], document["metadata"]["name"]): document
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
CUSTOM = {"ScaledObject", "PodMonitor"}
BUILT_IN = [pytest.param(m, id=kind) for (kind, _), m in MANIFESTS.items() if kind not in CUSTOM]
# the newest that kubernetes-validate knows, and one that is some years older
VERSIONS = ["1.37", "1.30"]
POD = MANIFESTS["Deployment", "noria"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
DATA = MANIFESTS["ConfigMap", "noria"]["data"]
SCALED_OBJECT = MANIFESTS["ScaledObject", "noria"]["spec"]
HPA = MANIFESTS["HorizontalPodAutoscaler", "noria"]["spec"]
# drain.sh's own defaults
SETTLE_S, DRAIN_LIMIT_S = 10, 120


class TestSchemas:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("manifest", BUILT_IN)
    def test_the_api_takes_it(self, manifest: dict[str, Any], version: str) -> None:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version

    @pytest.mark.parametrize("manifest", BUILT_IN)
    def test_an_unknown_field_would_be_noticed(self, manifest: dict[str, Any]) -> None:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(manifest | {"sepc": {}}, VERSIONS[0], strict=True)

    def test_keda_documents_the_fields(self) -> None:
        """keda.sh: ScaledObject specification, Prometheus scaler."""
        scaled_object = MANIFESTS["ScaledObject", "noria"]
        assert scaled_object["apiVersion"] == "keda.sh/v1alpha1"
        assert set(SCALED_OBJECT) <= {
            *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount"),
            *("minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"),
        }
        assert set(SCALED_OBJECT["fallback"]) == {"failureThreshold", "replicas", "behavior"}
        assert SCALED_OBJECT["fallback"]["behavior"] in ("static", "currentReplicas", "currentReplicasIfHigher")
        for trigger in SCALED_OBJECT["triggers"]:
            assert set(trigger) == {"type", "name", "metricType", "metadata"}
            assert trigger["type"] == "prometheus"
            assert trigger["metricType"] in ("AverageValue", "Value")
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
            assert all(isinstance(value, str) for value in trigger["metadata"].values())

    def test_kedas_behaviour_is_what_the_api_takes_for_an_autoscaler(self) -> None:
        behaviour = SCALED_OBJECT["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behaviour == HPA["behavior"]

    def test_the_prometheus_operator_documents_the_fields(self) -> None:
        """prometheus-operator.dev: API reference, PodMonitor."""
        monitor = MANIFESTS["PodMonitor", "noria"]
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(monitor["spec"]) == {"selector", "jobLabel", "podMetricsEndpoints"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert set(endpoint) == {"port", "interval", "scrapeTimeout"}
        assert endpoint["port"] in {port["name"] for port in CONTAINER["ports"]}

    def test_the_adapter_documents_the_fields(self) -> None:
        """kubernetes-sigs/prometheus-adapter: docs/config.md, docs/externalmetrics.md."""
        lists = yaml.safe_load(MANIFESTS["ConfigMap", "noria-adapter-rules"]["data"]["config.yaml"])
        assert set(lists) == {"rules", "externalRules"}
        for rule in lists["rules"] + lists["externalRules"]:
            assert (
                {"seriesQuery", "resources", "metricsQuery"}
                <= set(rule)
                <= {
                    *("seriesQuery", "seriesFilters", "resources", "name", "metricsQuery"),
                }
            )

    def test_the_autoscaler_asks_what_the_adapter_offers(self) -> None:
        lists = yaml.safe_load(MANIFESTS["ConfigMap", "noria-adapter-rules"]["data"]["config.yaml"])

        def offered(rules: list[dict[str, Any]]) -> set[str]:
            return {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0] for rule in rules}

        asked = [(metric["type"], metric[metric["type"].lower()]["metric"]["name"]) for metric in HPA["metrics"]]
        assert {name for kind, name in asked if kind == "Pods"} == offered(lists["rules"])
        assert {name for kind, name in asked if kind == "External"} == offered(lists["externalRules"])


class TestPod:
    def test_labels_find_it(self) -> None:
        labels = POD["metadata"]["labels"]
        assert MANIFESTS["Service", "noria"]["spec"]["selector"] == labels
        for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
            assert MANIFESTS[kind, "noria"]["spec"]["selector"]["matchLabels"] == labels
        job_label = MANIFESTS["PodMonitor", "noria"]["spec"]["jobLabel"]
        (down,) = (rule for rule in rules() if rule.get("alert") == "NoriaDown")
        assert f'job="{labels[job_label]}"' in down["expr"]

    def test_everything_is_in_one_namespace(self) -> None:
        own = [m for (_, name), m in MANIFESTS.items() if name == "noria"]
        assert {manifest["metadata"]["namespace"] for manifest in own} == {"noria"}
        queries = [trigger["metadata"]["query"] for trigger in SCALED_OBJECT["triggers"]]
        assert all('namespace="noria"' in query for query in queries)

    def test_ports_are_the_servers(self) -> None:
        options = ServerOptions(default_repository())
        ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
        assert ports == {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}
        for port in MANIFESTS["Service", "noria"]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]

    def test_arguments_and_settings_are_ones_that_serve_takes(self) -> None:
        args = cli_parser().parse_args(["serve", *CONTAINER["args"]])
        check_mode(default_repository(), args.mode)
        (variable,) = CONTAINER["env"]
        assert variable["name"] == ENVIRONMENT_VARIABLE
        text = DATA[variable["valueFrom"]["configMapKeyRef"]["key"]]
        config = load_engine_config(default_repository() / "llm" / "1" / "engine.json", environment=text)
        assert str(config.num_threads) == CONTAINER["resources"]["limits"]["cpu"]

    def test_probes(self) -> None:
        startup, readiness, liveness = (CONTAINER[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * READY_TIMEOUT_S
        assert startup["httpGet"] == readiness["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
        program, *arguments = liveness["exec"]["command"]
        args = cli_parser().parse_args(arguments)
        assert (program, args.command) == ("noria", "health")

    def test_has_the_time_to_drain_and_to_stop(self) -> None:
        assert f"SETTLE_S:-{SETTLE_S}" in DATA["drain.sh"]
        assert f"LIMIT_S:-{DRAIN_LIMIT_S}" in DATA["drain.sh"]
        assert POD["spec"]["terminationGracePeriodSeconds"] >= SETTLE_S + DRAIN_LIMIT_S + STOP_TIMEOUT_S
        (mount,) = (m for m in CONTAINER["volumeMounts"] if m["name"] == "config")
        assert CONTAINER["lifecycle"]["preStop"]["exec"]["command"] == ["sh", f"{mount['mountPath']}/drain.sh"]

    def test_has_shared_memory_and_may_write_only_where_it_must(self) -> None:
        volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
        assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
        shm = volumes["shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"].removesuffix("Gi")) * 2**30 >= 4 * MIN_SHM_BYTES
        paths = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
        assert (paths["shm"], paths["cache"]) == ("/dev/shm", "/cache")
        assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
        user = POD["spec"]["securityContext"]["runAsUser"]
        assert f"USER {user}:" in (DOCKER / "Dockerfile").read_text()


def test_both_autoscalers_scale_the_deployment_alike() -> None:
    assert SCALED_OBJECT["scaleTargetRef"]["name"] == HPA["scaleTargetRef"]["name"]
    assert ("Deployment", HPA["scaleTargetRef"]["name"]) in MANIFESTS
    assert "replicas" not in MANIFESTS["Deployment", "noria"]["spec"], "an apply would undo the autoscaler's number"
    assert SCALED_OBJECT["minReplicaCount"] == HPA["minReplicas"]
    assert SCALED_OBJECT["maxReplicaCount"] == HPA["maxReplicas"]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in SCALED_OBJECT["triggers"]]
    targets = [metric[metric["type"].lower()]["target"] for metric in HPA["metrics"]]
    values = [target.get("averageValue") or target["value"] for target in targets]
    assert thresholds == [float(v[:-1]) / 1000 if v.endswith("m") else float(v) for v in values]


def test_without_traffic_the_latency_trigger_is_zero_and_not_nan(tmp_path: Path) -> None:
    """KEDA up to 2.19 read NaN as a large negative number (kedacore/keda#7475)."""
    (query,) = (t["metadata"]["query"] for t in SCALED_OBJECT["triggers"] if t["name"] == "ttft")
    series = 'noria_time_to_first_token_seconds_bucket{namespace="noria",model="llm",le="%s"}'
    cases = {"0x20": 0.0, "0+10x20": 2.0}
    tests = [
        {
            "interval": "15s",
            # all requests take from 20 to 30 s, or there are none
            "input_series": [
                {"series": series % "20", "values": "0x20"},
                {"series": series % "30", "values": values},
                {"series": series % "+Inf", "values": values},
            ],
            "promql_expr_test": [
                {"expr": query, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": expected}]}
            ],
        }
        for values, expected in cases.items()
    ]
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", path)


class TestDrain:
    """drain.sh as it is in the ConfigMap, before a stand-in for the metrics port."""

    @contextmanager
    def metrics(self, **gauges: int) -> Iterator[tuple[str, dict[str, int]]]:
        """The endpoint's address, and its values, which the test may change."""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = ["# HELP noria_num_requests_running 9", "noria_num_requests_running_max{} 7"]
                lines += [f'{name}{{model="llm",version="1"}} {value}' for name, value in gauges.items()]
                self.send_response(200)
                self.end_headers()
                self.wfile.write("\n".join([*lines, ""]).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}/metrics", gauges
        finally:
            server.shutdown()
            server.server_close()

    def start(self, url: str, limit_s: int) -> subprocess.Popen[bytes]:
        tool("curl", "curl")
        environment = os.environ | {"METRICS_URL": url, "SETTLE_S": "0", "LIMIT_S": str(limit_s)}
        return subprocess.Popen(["sh", "-c", DATA["drain.sh"]], env=environment)

    def test_waits_for_whoever_is_still_served(self) -> None:
        names = [f"noria_num_requests_{state}" for state in ("running", "waiting", "paused")]
        with ExitStack() as stack:
            runs = []
            for name in [*names, "nv_inference_pending_request_count"]:
                url, gauges = stack.enter_context(self.metrics(**{name: 1}))
                runs.append((self.start(url, limit_s=30), gauges))
            time.sleep(2.5)
            assert [process.poll() for process, _ in runs] == [None] * 4
            for _, gauges in runs:
                gauges.update(dict.fromkeys(gauges, 0))
            assert [process.wait(timeout=10) for process, _ in runs] == [0] * 4

    def test_waits_no_longer_than_its_limit(self) -> None:
        with self.metrics(noria_num_requests_running=1) as (url, _):
            assert self.start(url, limit_s=2).wait(timeout=15) == 0

    def test_a_server_that_is_gone_holds_nobody_up(self) -> None:
        with self.metrics() as (url, _):
            pass
        assert self.start(url, limit_s=30).wait(timeout=15) == 0


def test_the_settings_are_an_object() -> None:
    assert isinstance(json.loads(DATA["engine.json"]), dict)
