"""Prometheus' and Grafana's files: by promtool itself, against each other, and against the code that they speak of.

Nothing here starts a server; tests/e2e/test_prometheus.py does.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from noria.config import EngineConfig
from noria.serving.server import ServerOptions
from support.prometheus import (
    DASHBOARD,
    DOCKER,
    PROMETHEUS,
    RULES,
    Query,
    autoscaler_queries,
    dashboard,
    dashboard_queries,
    panels,
    promtool,
    rules,
)

GRAFANA = DOCKER / "grafana"
QUESTIONS = [
    "Is it saturated?",
    "Is it the queue, the prefill or the KV cache?",
    "Who suffers?",
    "What did preemption cost?",
]


def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def mounts(service: str) -> dict[str, str]:
    """Source by target."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in services()[service]["volumes"]}


def only_yaml(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.yaml")
    return yaml.safe_load(path.read_text())


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS / "prometheus.yaml")
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_the_rules_do_what_their_unit_tests_say() -> None:
    for path in (PROMETHEUS / "tests").glob("*.yaml"):
        assert "SUCCESS" in promtool("test", "rules", path)


def test_every_alert_has_a_unit_test_a_severity_and_a_runbook() -> None:
    tests = "".join(path.read_text() for path in (PROMETHEUS / "tests").glob("*.yaml"))
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 6
    for rule in alerts:
        assert rule["alert"] in tests
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"]
        assert rule["for"]
        assert f"`{rule['alert']}`" in (DOCKER.parent / "docs" / "operations.md").read_text()


def test_every_query_of_the_dashboard_and_of_the_autoscalers_is_promql(tmp_path: Path) -> None:
    """promtool reads an expression only inside of rules, so they are made rules."""
    queries = dashboard_queries() + autoscaler_queries()
    written = [{"record": f"query:{index}", "expr": query.expr} for index, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": written}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path)


class TestDashboard:
    def test_rows_ask_the_questions_in_order(self) -> None:
        assert [p["title"] for p in dashboard()["panels"] if p["type"] == "row"][: len(QUESTIONS)] == QUESTIONS

    def test_panels_fill_the_grid_without_overlap(self) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in dashboard()["panels"]:
            x, y, width, height = (panel["gridPos"][key] for key in ("x", "y", "w", "h"))
            cells = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
            assert not cells & taken, panel["title"]
            taken |= cells
        lines = max(line for _, line in taken) + 1
        assert len(taken) == 24 * lines, "a hole, or a panel beyond the 24 columns"

    def test_every_panel_is_described_and_has_an_id_of_its_own(self) -> None:
        ids = [panel["id"] for panel in dashboard()["panels"]]
        assert len(set(ids)) == len(ids)
        assert all(panel["description"] and panel["targets"] for panel in panels())

    @pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
    def test_a_panel_names_a_knob_and_every_name_is_a_settings(self, panel: dict[str, Any]) -> None:
        settings = {field.name for field in fields(EngineConfig)}
        # Triton's, a request's, and a value
        known = settings | {"max_batch_size", "cache_salt", "guaranteed_no_evict"}
        words = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", panel["description"]))
        assert words
        assert words <= known

    def test_variables_are_for_data_source_model_mode_and_the_objectives(self) -> None:
        variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
        assert list(variables) == ["datasource", "model", "mode", "ttft_slo", "tpot_slo"]
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
        for query in (target["expr"] for panel in panels() for target in panel["targets"]):
            assert '=~"$model"' in query or "noria:slo" in query, query

    def test_is_provisioned_with_the_data_source_that_it_asks(self) -> None:
        (source,) = only_yaml(GRAFANA / "provisioning" / "datasources")["datasources"]
        (variable,) = (v for v in dashboard()["templating"]["list"] if v["type"] == "datasource")
        assert (variable["query"], variable["current"]["value"]) == (source["type"], source["uid"])
        scrape_interval = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())["global"]["scrape_interval"]
        assert source["jsonData"]["timeInterval"] == scrape_interval
        (provider,) = only_yaml(GRAFANA / "provisioning" / "dashboards")["providers"]
        mounted = mounts("grafana")
        assert DOCKER / mounted[provider["options"]["path"]] == DASHBOARD.parent
        assert DOCKER / mounted["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
        home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


class TestCompose:
    @pytest.mark.parametrize(("name", "port"), [("prometheus", 9090), ("grafana", 3000)])
    def test_monitoring_is_pinned_asked_for_and_published_on_this_machine_alone(self, name: str, port: int) -> None:
        service = services()[name]
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["profiles"] == ["monitoring"]
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]

    def test_prometheus_reads_our_files_and_grafana_finds_it(self) -> None:
        assert DOCKER / mounts("prometheus")["/etc/prometheus"] == PROMETHEUS
        assert "--config.file=/etc/prometheus/prometheus.yaml" in services()["prometheus"]["command"]
        (source,) = only_yaml(GRAFANA / "provisioning" / "datasources")["datasources"]
        assert source["url"] == "http://prometheus:9090"

    @pytest.mark.parametrize("name", ["noria", "noria-cpu"])
    def test_prometheus_scrapes_whichever_server_runs(self, name: str) -> None:
        (scrape,) = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())["scrape_configs"]
        (alias,) = services()[name]["networks"]["default"]["aliases"]
        assert scrape["static_configs"] == [{"targets": [f"{alias}:{ServerOptions(DOCKER).metrics_port}"]}]
        assert scrape["job_name"] == "noria", "NoriaDown and the PodMonitor say so too"


def test_a_bad_query_would_be_noticed(tmp_path: Path) -> None:
    bad = Query("bad", "sum(rate(noria_steps_total))")
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "bad", "rules": [{"record": "a:b", "expr": bad.expr}]}]}))
    with pytest.raises(AssertionError, match="expected type range vector"):
        promtool("check", "rules", path)
