"""Prometheus text is read strictly, and counters become ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria_bench.engine_counters import EngineCounters
from noria_bench.server_metrics import Exposition, Sample, exposition, parse_metrics, scrape
from noria_client.errors import ServerError


def test_samples():
    text = """
# HELP noria_steps_total Steps
# TYPE noria_steps_total counter
noria_steps_total{model="llm",version="1"} 12
plain 3.5e2
spaced { a = "b" , c = "d", } 1 1700000000
infinite{le="+Inf"} +Inf
empty{} 0
"""
    assert parse_metrics(text) == [
        Sample("noria_steps_total", {"model": "llm", "version": "1"}, 12),
        Sample("plain", {}, 350),
        Sample("spaced", {"a": "b", "c": "d"}, 1),
        Sample("infinite", {"le": "+Inf"}, float("inf")),
        Sample("empty", {}, 0),
    ]


def test_labels_with_what_the_format_itself_uses():
    text = r'm{path="C:\\new",quote="say \"hi\", {ok}",line="a\nb",brace="}",utf="é"} 1'
    assert parse_metrics(text)[0].labels == {
        "path": "C:\\new",
        "quote": 'say "hi", {ok}',
        "line": "a\nb",
        "brace": "}",
        "utf": "é",
    }


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])))
def test_any_label_value_survives(value):
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    assert parse_metrics(f'm{{a="{escaped}"}} 1') == [Sample("m", {"a": value}, 1)]


@pytest.mark.parametrize(
    "line", ["m", "m one", 'm{a="b} 1', "m{a=b} 1", 'm{a="b" c="d"} 1', "9m 1", r'm{a="\x"} 1', "m 1 2 3"]
)
def test_what_is_no_sample_is_refused(line):
    with pytest.raises(ValueError, match="not a metric sample"):
        parse_metrics(line)


def counters(**values):
    names = ["steps", "slot_steps", "useful_slot_steps", "rows", "kv_allocated_slot_steps", "kv_live_slot_steps"]
    return EngineCounters(**dict.fromkeys([*names, "preemptions"], 0) | values)


def test_counters_of_one_model_over_its_versions():
    text = """
noria_rows_total{model="llm",version="1"} 3
noria_rows_total{model="llm",version="2"} 4
noria_rows_total{model="other",version="1"} 100
noria_preemptions_total{model="llm",version="1"} 2
noria_requests_finished_total{model="llm",version="1",class="1"} 5
noria_requests_finished_total{model="llm",version="1",class="2"} 6
"""
    assert exposition(text, "llm").counters() == counters(rows=7, preemptions=2, requests_finished=11)


def test_a_histogram_over_all_labels_but_its_bounds():
    text = """
wait_bucket{model="llm",class="1",le="1"} 1
wait_bucket{model="llm",class="2",le="1"} 2
wait_bucket{model="llm",class="1",le="+Inf"} 3
wait_bucket{model="llm",class="2",le="+Inf"} 4
wait_sum{model="llm",class="1"} 2.5
wait_count{model="llm",class="1"} 3
"""
    histogram = exposition(text, "llm").histogram("wait")
    assert histogram.counts == {1.0: 3.0, float("inf"): 7.0}
    assert (histogram.total, histogram.num_observations) == (2.5, 7.0)


def test_ratios_of_what_grew():
    before = counters(steps=5, rows=5, slot_steps=40, useful_slot_steps=5, kv_allocated_slot_steps=16)
    after = counters(
        steps=505,
        rows=2005,
        slot_steps=2040,
        useful_slot_steps=675,
        kv_allocated_slot_steps=116,
        kv_live_slot_steps=75,
    )
    grown = after - before
    # the four requests of 20, 50, 100 and 500 tokens that a static batch holds for 500 steps
    assert grown.slot_utilisation == 670 / 2000
    assert grown.mean_batch == 4
    assert grown.kv_waste == 0.25


def test_ratios_of_an_idle_engine():
    idle = counters() - counters()
    assert (idle.slot_utilisation, idle.mean_batch, idle.kv_waste) == (None, None, None)


def test_a_restarted_server_is_noticed():
    with pytest.raises(ValueError, match=r"noria_rows_total shrank by 3\b"):
        counters(rows=2) - counters(rows=5)


def test_scrape_of_a_real_server(echo_server):
    for address in (echo_server.metrics, f"http://{echo_server.metrics}/metrics"):
        now = scrape(address, "stream")
        assert isinstance(now, Exposition)
        assert now.has("nv_inference_request_success")
        assert now.counters() == counters()


def test_scrape_without_a_server():
    with pytest.raises(ServerError) as caught:
        scrape("127.0.0.1:1", "llm")
    assert caught.value.code == "UNAVAILABLE"
