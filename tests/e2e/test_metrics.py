"""Metrics of the real server and model: against the client's own ledger, under other systems' names, of a stuck engine.

In-flight with a short queue, so that a few requests fill it.
"""

import asyncio
import http.client
import json
import os
import random
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from noria.commands.health import find_fault
from noria.serving.server import RunningServer
from noria_bench.server_metrics import Sample, parse_metrics
from noria_client.client import AsyncClient, Client
from noria_client.errors import ServerError
from support.load_gauges import GAUGES_OF_LOAD
from support.processes import children

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
TIMEOUT_S = 60.0
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0}
MAX_QUEUE_SIZE = 6
# more than there are slots and places in the queue
CONCURRENCY = 8 + MAX_QUEUE_SIZE + 4


class Scrape:
    """One scrape of a server."""

    def __init__(self, server: RunningServer) -> None:
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
            self.text = response.read().decode()
        self.samples: list[Sample] = parse_metrics(self.text)

    def total(self, name: str, **labels: str) -> float:
        """Over all series with these labels; one at least must be there."""
        values = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= dict(sample.labels).items()
        ]
        assert values, f"no {name} with {labels}"
        return sum(values)


def wait_for(server: RunningServer, condition: Callable[[Scrape], bool]) -> Scrape:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(scrape := Scrape(server)):
        assert time.monotonic() < deadline, scrape.text
        time.sleep(0.05)
    return scrape


@dataclass(frozen=True)
class FreshServer:
    server: RunningServer
    first: Scrape


@pytest.fixture(scope="module")
def fresh(start_server: Callable[..., RunningServer]) -> FreshServer:
    """No other module's tests have used this one, so the first scrape is the first of all."""
    server = start_server("inflight", max_queue_size=MAX_QUEUE_SIZE)
    return FreshServer(server, Scrape(server))


@pytest.fixture
def server(fresh: FreshServer) -> Iterator[RunningServer]:
    yield fresh.server
    wait_for(fresh.server, lambda scrape: all(scrape.total(name) == 0 for name in GAUGES_OF_LOAD))


@dataclass
class Ledger:
    """What a client saw, by what became of each request and by (that, priority).

    The rest: of answers, their tokens; of the prompt, its tokens.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    by_class: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0

    def note(self, kind: str, priority: int) -> None:
        self.by_kind[kind] += 1
        self.by_class[kind, priority] += 1

    def num(self, *kinds: str) -> int:
        return sum(self.by_kind[kind] for kind in kinds)


async def ask(client: AsyncClient, kind: str, priority: int, ledger: Ledger) -> None:
    sampling = (
        GREEDY
        | {
            "length": {"max_tokens": 2, "ignore_eos": True},
            "stop": {"max_tokens": 16, "stop": ["Paris"]},
            "invalid": {"max_tokens": -1},
            "expires": {"max_tokens": 500, "ignore_eos": True},
            "leaves": {"max_tokens": 500, "ignore_eos": True},
        }[kind]
    )
    try:
        if kind == "leaves":
            async with aclosing(client.stream(PROMPT, priority=priority, **sampling)) as deltas:
                async for _ in deltas:
                    break
            ledger.note("cancelled", priority)
            return
        timeout_s = 0.3 if kind == "expires" else None
        answer = await client.generate(PROMPT, priority=priority, timeout_s=timeout_s, **sampling)
    except ServerError as error:
        ledger.note(kind_of(str(error)), priority)
        return
    ledger.num_output_tokens += answer.num_output_tokens
    ledger.num_prompt_tokens = answer.num_input_tokens
    ledger.note(answer.finish_reason, priority)


def kind_of(error: str) -> str:
    words = {
        "the waiting queue is full": "rejected",
        "the request's timeout passed": "expired",
        "max_tokens must be from 1": "invalid",
        # the client gives up a second after the server's deadline: on a busy machine it may be the first to do so
        "Deadline Exceeded": "expired or cancelled",
    }
    return next((kind for start, kind in words.items() if start in error), error)


async def run_mix(url: str, num_requests: int) -> Ledger:
    """In a random order that is always the same."""
    shares = {"length": 0.58, "stop": 0.2, "invalid": 0.1, "leaves": 0.09, "expires": 0.03}
    rng = random.Random(5)
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * num_requests))]
    rng.shuffle(kinds)
    ledger, places = Ledger(), asyncio.Semaphore(CONCURRENCY)

    async with AsyncClient(url) as client:

        async def one(kind: str, priority: int) -> None:
            async with places:
                await ask(client, kind, priority, ledger)

        await asyncio.gather(*(one(kind, rng.randint(1, 3)) for kind in kinds))
    assert ledger.num(*ledger.by_kind) == len(kinds) == num_requests
    return ledger


@pytest.mark.parametrize("num_requests", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_counters_equal_the_clients_ledger_after_mixed_requests(server: RunningServer, num_requests: int) -> None:
    before = Scrape(server)
    ledger = asyncio.run(run_mix(server.grpc_url, num_requests))
    # every kind did occur, and nothing else did
    num_unclear = ledger.by_kind["expired or cancelled"]
    assert set(ledger.by_kind) - {"expired or cancelled"} == {
        *("length", "stop", "rejected", "expired", "cancelled", "invalid"),
    }
    num_finished = ledger.num("length", "stop")
    num_failed = ledger.num("rejected", "expired", "cancelled") + num_unclear

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    after = before
    deadline = time.monotonic() + TIMEOUT_S
    while (
        grown("noria_requests_finished_total") + grown("noria_requests_failed_total") < num_finished + num_failed
        or grown("noria_e2e_request_latency_seconds_count") < num_finished
    ):
        assert time.monotonic() < deadline, (ledger, after.text)
        time.sleep(0.1)
        after = Scrape(server)

    assert grown("noria_requests_finished_total") == num_finished
    assert grown("noria_requests_failed_total") == num_failed
    assert grown("noria_requests_rejected_total") == ledger.num("rejected")
    assert grown("noria_requests_invalid_total") == ledger.num("invalid")
    assert 0 <= grown("noria_requests_expired_total") - ledger.num("expired") <= num_unclear
    assert 0 <= grown("noria_requests_cancelled_total") - ledger.num("cancelled") <= num_unclear
    for level in (1, 2, 3):
        own = {"class": str(level)}
        num_own = ledger.by_class["length", level] + ledger.by_class["stop", level]
        assert grown("noria_requests_finished_total", **own) == num_own
        assert grown("noria_requests_rejected_total", **own) == ledger.by_class["rejected", level]
        assert grown("noria_e2e_request_latency_seconds_count", **own) == num_own
    ends = {
        reason: grown("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    num_aborted = ledger.num("expired", "cancelled") + num_unclear
    assert ends == {
        "stop": ledger.num("stop"),
        "length": ledger.num("length"),
        "abort": num_aborted,
        "error": 0,
    }
    assert grown("noria_request_generation_tokens_sum") == ledger.num_output_tokens
    assert grown("noria_generation_tokens_total") >= ledger.num_output_tokens + ledger.num("cancelled")
    num_taken_in = num_finished + num_aborted
    assert grown("noria_prompt_tokens_total") == ledger.num_prompt_tokens * num_taken_in
    assert num_finished + ledger.num("cancelled") <= grown("noria_queue_time_seconds_count") <= num_taken_in
    # the fixture waits for the gauges to be 0 again, with no further request


def test_the_first_scrape_has_every_series_and_its_mode(fresh: FreshServer) -> None:
    documented = re.findall(r"^\| `([a-z_:0-9]+)", DOCS.read_text(), re.MULTILINE)
    closed_only = {"nv_trt_llm_v1_metrics"}
    there = {sample.name.removesuffix("_bucket") for sample in fresh.first.samples}
    assert len(documented) > 50
    assert set(documented) - there == closed_only
    own = [sample for sample in fresh.first.samples if sample.name.startswith("noria_")]
    assert {(sample.labels["model"], sample.labels["version"], sample.labels["mode"]) for sample in own} == {
        ("llm", "1", "inflight")
    }
    for name in (*GAUGES_OF_LOAD, "noria_requests_finished_total", "noria_slot_utilisation"):
        assert fresh.first.total(name) == 0
    for level in ("1", "2", "3"):
        assert fresh.first.total("noria_requests_failed_total", **{"class": level}) == 0
        assert fresh.first.total("noria_time_to_first_token_seconds_count", **{"class": level}) == 0
    assert fresh.first.total("noria_max_num_seqs") == 8
    assert fresh.first.total("noria_kv_blocks") > 0
    assert abs(time.time() - fresh.first.total("noria_heartbeat_timestamp_seconds")) < 3600


@pytest.mark.parametrize("mode", ["inflight", "static"])
def test_other_systems_names_agree_with_ours(
    start_server: Callable[..., RunningServer], fresh: FreshServer, mode: str
) -> None:
    server = fresh.server if mode == "inflight" else start_server(mode)
    before = Scrape(server)
    with Client(server.grpc_url) as client:
        stream = client.stream(PROMPT, max_tokens=500, ignore_eos=True, **GREEDY)
        next(stream)
        # a publication may lie between two of a scrape's series, so this waits for one that does not
        running = wait_for(server, lambda scrape: agrees(scrape, mode) and scrape.total("noria_num_tokens_running") > 5)
        assert running.total("vllm:num_requests_running") == 1
        assert running.total("nv_trt_llm_request_metrics", request_type="active") == 1
        if mode == "static":
            assert running.total("nv_trt_llm_v1_metrics", v1_specific_metric="empty_generation_slots") == 7
        stream.close()
        num_tokens = client.generate(PROMPT, max_tokens=7, ignore_eos=True, **GREEDY).num_output_tokens
    assert num_tokens == 7
    num_before = before.total("noria_requests_finished_total")
    after = wait_for(
        server,
        lambda scrape: agrees(scrape, mode) and scrape.total("noria_requests_finished_total") == num_before + 1,
    )
    assert after.total("noria_num_requests_running") == 0
    v1_or_inflight = "nv_trt_llm_inflight_batcher_metrics" if mode == "inflight" else "nv_trt_llm_v1_metrics"
    assert after.total(v1_or_inflight) == 0


def agrees(scrape: Scrape, mode: str) -> bool:
    total = scrape.total
    pairs = {
        "vllm:prompt_tokens_total": "noria_prompt_tokens_total",
        "vllm:generation_tokens_total": "noria_generation_tokens_total",
        "vllm:num_preemptions_total": "noria_preemptions_total",
        "vllm:prefix_cache_queries_total": "noria_prefix_tokens_total",
        "vllm:prefix_cache_hits_total": "noria_prefix_hit_tokens_total",
        "vllm:num_requests_running": "noria_num_requests_running",
        "vllm:num_requests_waiting": "noria_num_requests_waiting",
        "vllm:kv_cache_usage_perc": "noria_kv_usage",
        "vllm:gpu_cache_usage_perc": "noria_kv_usage",
        "vllm:time_to_first_token_seconds_count": "noria_requests_finished_total",
        "vllm:e2e_request_latency_seconds_count": "noria_requests_finished_total",
        "vllm:request_generation_tokens_sum": "noria_request_generation_tokens_sum",
        "vllm:request_time_per_output_token_seconds_sum": "noria_time_per_output_token_seconds_sum",
    }
    requests = {
        kind: total("nv_trt_llm_request_metrics", request_type=kind) for kind in ("max", "scheduled", "waiting")
    }
    blocks = {
        kind: total("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "used", "free", "tokens_per", "fraction")
    }
    if mode == "inflight":
        total("nv_trt_llm_inflight_batcher_metrics", inflight_batcher_specific_metric="generation_requests")
    return (
        all(abs(total(theirs) - total(ours)) < 1e-9 for theirs, ours in pairs.items())
        and requests["scheduled"] == total("noria_num_requests_running")
        and requests["waiting"] == total("noria_num_requests_waiting")
        and requests["max"] == total("noria_max_num_seqs")
        and blocks["max"] == total("noria_kv_blocks")
        and blocks["used"] == total("noria_kv_blocks_held")
        and blocks["free"] == blocks["max"] - blocks["used"]
        and blocks["fraction"] == total("noria_kv_usage")
        and blocks["tokens_per"] == 16
    )


def test_tritons_orca_header_finds_what_it_is_made_of(server: RunningServer) -> None:
    """The front end reads lines of this form in its own exposition, and of them max, used and tokens_per.

    The header came after tritonserver 2.51, which answers without it; where there is one, it must say the same.
    """
    # without a capital E: 1e-05 would be read as 1
    line = re.compile(r'^nv_trt_llm_kv_cache_block_metrics\{(?:\w+="[^"]*",?)*\} \d+(?:\.\d+)?$')
    scrape = Scrape(server)
    lines = [line for line in scrape.text.splitlines() if line.startswith("nv_trt_llm_kv_cache_block_metrics{")]
    assert len(lines) == 6
    assert [one for one in lines if not line.match(one)] == []
    figures = {
        kind: scrape.total("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "used", "tokens_per")
    }
    for form in ("text", "json"):
        connection = http.client.HTTPConnection(server.http_url, timeout=TIMEOUT_S)
        body = {"text_input": PROMPT, "max_tokens": 2} | GREEDY
        connection.request("POST", "/v2/models/llm/generate", json.dumps(body), {"endpoint-load-metrics-format": form})
        response = connection.getresponse()
        header = response.getheader("endpoint-load-metrics")
        assert json.loads(response.read())["text_output"].startswith(PROMPT)
        connection.close()
        if header is not None:
            assert header.startswith(form.upper())
            assert f"{figures['max'] * figures['tokens_per']:.0f}" in header


@pytest.mark.slow
def test_an_unload_leaves_no_load_behind_and_after_a_load_it_goes_on(server: RunningServer) -> None:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    with Client(server.grpc_url) as own:
        own.generate(PROMPT, max_tokens=2, **GREEDY)
    before = wait_for(server, lambda scrape: scrape.total("noria_num_requests_running") == 0)
    assert find_fault(server.metrics_address, max_age_s=30) is None
    client.unload_model("llm")
    gauges = (*GAUGES_OF_LOAD, "noria_kv_blocks", "noria_max_num_seqs", "noria_heartbeat_timestamp_seconds")
    after = wait_for(server, lambda scrape: all(scrape.total(name) == 0 for name in gauges))
    assert "no model is loaded" in str(find_fault(server.metrics_address, max_age_s=30))
    assert after.total("noria_requests_finished_total") >= before.total("noria_requests_finished_total")
    client.load_model("llm")
    loaded = Scrape(server)
    assert find_fault(server.metrics_address, max_age_s=30) is None
    assert loaded.total("noria_max_num_seqs", mode="inflight") == 8
    with Client(server.grpc_url) as own:
        own.generate(PROMPT, max_tokens=2, **GREEDY)
    num_finished = after.total("noria_requests_finished_total")
    wait_for(server, lambda scrape: scrape.total("noria_requests_finished_total") == num_finished + 1)
    wait_for(server, lambda scrape: scrape.total("vllm:e2e_request_latency_seconds_count") == num_finished + 1)


def test_a_process_that_hangs_lets_the_heartbeat_go_stale_though_triton_says_ready(server: RunningServer) -> None:
    (stub,) = children(server.pid)
    os.kill(stub, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while (fault := find_fault(server.metrics_address, max_age_s=2.0)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "the engine of model llm last turned" in fault
        with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=10) as response:
            assert response.status == 200
    finally:
        os.kill(stub, signal.SIGCONT)
    deadline = time.monotonic() + TIMEOUT_S
    while find_fault(server.metrics_address, max_age_s=2.0) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
