"""`noria simulate`: what it prints and writes, against what can be worked out by hand, and what it says of mistakes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from noria.cli import main
from noria.commands import sim_options, validation
from noria.commands.common import engine_config
from noria.config import EngineConfig
from noria.engine.trace import StepTrace
from noria.errors import ConfigError
from noria.scheduling.build import build_scheduler
from noria.serving.server import ServerOptions, default_repository
from noria.simulation.batch_former import dynamic_batching_for
from noria.simulation.cost_model import MeasuredCostModel
from noria.timeline.recorded_trace import read_trace
from noria_bench.records import Chunk, RequestRecord
from noria_bench.workload import Workload, seed_workload
from support.engines import HashRunner, make_request

# every step takes a second, whatever is in it
ONE_SECOND = MeasuredCostModel(((1, 1.0),), origin={"kv_bytes_per_token": 46080})
MODES = ("static", "dynamic", "inflight")


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    ONE_SECOND.save(path)
    return str(path)


def simulate(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "results.json"
    assert main(["simulate", "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text())


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sim_options.add_cost_arguments(parser)
    sim_options.add_simulated_engine_arguments(parser)
    sim_options.add_workload_arguments(parser)
    return parser.parse_args(arguments)


def test_it_reports_what_a_measurement_would(tmp_path: Path, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--workload", "constant:5", "--prompt-tokens", "constant:3", "--num-requests", "16")
    results = simulate(tmp_path, "--costs", costs, "--slo", "ttft_p95=6,tpot_p95=2", *arguments)
    assert [result["label"] for result in results] == list(MODES)
    for result in results:
        # two batches of 8, of 5 steps of a second each
        summed = result["summary"]["all"]
        assert summed["wall_s"] == 10
        assert summed["output_tokens_per_s"] == 8
        assert summed["tpot_s"]["median"] == 1
        assert summed["outcomes"] == {"finished": 16}
        assert summed["good_share"] == 1
        assert result["summary"]["server"]["queue_s"]["median"] == 2.5
    output = capsys.readouterr().out
    assert "useful output tokens/s" in output
    assert "times real time" in output


def test_goodput_counts_the_requests_that_keep_all_of_the_slo(tmp_path: Path, costs: str) -> None:
    workload = ("--workload", "constant:5", "--prompt-tokens", "constant:3", "--num-requests", "16")
    (result,) = simulate(tmp_path, "--costs", costs, "--modes", "inflight", "--slo", "ttft_p95=2", *workload)
    # the second batch of 8 has to wait for the first
    assert result["summary"]["all"]["good_share"] == 0.5
    assert result["summary"]["all"]["good_requests_per_s"] == 8 / 10


def test_replicas_share_the_requests(tmp_path: Path, costs: str) -> None:
    workload = ("--workload", "constant:5", "--prompt-tokens", "constant:3", "--num-requests", "16")
    one = ("--costs", costs, "--modes", "inflight", *workload)
    for more in (("--replicas", "2"), ("--replicas", "2", "--router", "least_tokens")):
        (result,) = simulate(tmp_path, *one, *more)
        assert (result["summary"]["all"]["wall_s"], result["simulation"]["replica_seconds"]) == (5, 10)
    rule = "max_replicas=2,max_waiting=1,interval_s=1,load_time_s=0"
    (result,) = simulate(tmp_path, *one, "--autoscale", rule)
    # the second replica comes when all requests have been sent to the first
    assert result["summary"]["all"]["wall_s"] == 10
    assert result["simulation"]["replica_seconds"] > 10


def test_the_seed_workload_is_the_one_that_is_measured() -> None:
    requests = sim_options.load_requests(parse("--scale", "0.5", "--seed", "3", "--num-requests", "9"))
    items = seed_workload(9, 0.5, 3).items
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in requests] == [
        (item.num_prompt_tokens, item.max_tokens) for item in items
    ]
    assert {request.arrival_s for request in requests} == {0.0}


def test_laws_arrivals_prefixes_and_scale() -> None:
    args = parse(
        *("--workload", "uniform:2:8", "--prompt-tokens", "constant:10", "--scale", "2", "--num-requests", "50"),
        *("--rate", "4", "--burstiness", "2", "--shared-prefix", "5:0.5"),
    )
    requests = sim_options.load_requests(args)
    assert requests == sim_options.load_requests(args)
    assert {request.num_prompt_tokens for request in requests} == {20}
    assert {request.num_output_tokens for request in requests} == {4, 6, 8, 10, 12, 14, 16}
    arrivals_s = [request.arrival_s for request in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] == pytest.approx(50 / 4, rel=0.5)
    sharing = [request for request in requests if request.prompt_token_ids is not None]
    assert 0 < len(sharing) < 50
    assert len({request.prompt_token_ids[:5] for request in sharing if request.prompt_token_ids}) == 1


def test_requests_from_files(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    path.write_text('[{"num_prompt_tokens": 4, "num_output_tokens": 6, "arrival_s": 1.5, "priority": 1}]')
    (request,) = sim_options.load_requests(parse("--workload", str(path), "--scale", "0.5"))
    assert (request.num_prompt_tokens, request.num_output_tokens, request.arrival_s, request.priority) == (2, 3, 1.5, 1)
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,4,2\n2023-11-16 18:00:08.0,5,3\n")
    requests = sim_options.load_requests(parse("--trace", str(trace), "--trace-speed", "4"))
    assert [(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens) for one in requests] == [(0, 4, 2), (2, 5, 3)]


def test_the_cache_has_as_many_blocks_as_in_the_engine(costs: str) -> None:
    # what the engine says of the embedded model, in float32 with blocks of 16 tokens and 1 GiB
    config, num_blocks = sim_options.simulated_config(parse("--costs", costs), "inflight")
    assert (num_blocks, config.num_host_blocks) == (1455, 0)
    swapping = parse("--costs", costs, "--engine", "preemption=swap", "--num-kv-blocks", "50")
    config, num_blocks = sim_options.simulated_config(swapping, "inflight")
    assert (num_blocks, config.num_host_blocks) == (50, 1456)
    assert sim_options.simulated_config(swapping, "static")[0].num_host_blocks == 0
    # on a chip the memory decides, unless a size is asked for
    analytic = ("--costs", "analytic:H100:Llama-2-7B")
    assert sim_options.simulated_config(parse(*analytic), "inflight")[1] == 6976
    assert sim_options.simulated_config(parse(*analytic, "--engine", "kv_cache_gib=1"), "inflight")[1] == 127


def test_the_preset_goes_under_the_keys_of_engine(costs: str) -> None:
    args = parse("--costs", costs, "--preset", "tgi", "--engine", "max_waiting_tokens=7")
    config, _ = sim_options.simulated_config(args, "inflight")
    assert (config.insertion, config.max_waiting_tokens) == ("waiting_served_ratio", 7)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_batches_are_formed_as_the_repository_says(mode: str) -> None:
    path = default_repository() / "llm" / "configs" / f"{mode}.pbtxt"
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    batching = dynamic_batching_for(engine_config(ServerOptions(default_repository(), mode)))
    assert batching.max_batch_size == config.max_batch_size
    assert list(batching.preferred_batch_sizes) == list(config.dynamic_batching.preferred_batch_size)
    delay_us = config.dynamic_batching.max_queue_delay_microseconds
    assert batching.max_queue_delay_s == pytest.approx(delay_us * 1e-6)


def test_a_machine_without_calibration_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["simulate"]) == 1
    error = capsys.readouterr().err
    assert "run `noria calibrate`" in error
    assert "embedded in float32" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--costs", "analytic:H200:GPT"], "a model of Llama-2-7B"),
        (["--costs", "missing.json"], "cannot read missing.json"),
        (["--workload", "poisson:3"], "constant:LENGTH"),
        (["--workload", "uniform:8:2"], "high must be"),
        (["--workload", "uniform:8"], "uniform:LOW:HIGH"),
        (["--workload", "missing.json"], "--workload: cannot read missing.json"),
        (["--burstiness", "2"], "--burstiness needs --rate"),
        (["--trace-speed", "2"], "--trace-speed needs --trace"),
        (["--prompt-tokens", "constant:5"], "--prompt-tokens needs a --workload that is a law"),
        (["--shared-prefix", "abc"], "--shared-prefix takes TOKENS or TOKENS:SHARE, not 'abc'"),
        (["--autoscale", "max_replicas=2"], "--autoscale needs something to act on"),
        (["--trace", "missing.csv"], "cannot read missing.csv"),
        (["--scale", "0"], "scale must be"),
        (["--workload", "constant:3", "--scale", "nan"], "scale must be"),
        (["--rate", "0"], "rate must be"),
        (["--shared-prefix", "8:2"], "share must be from 0 to 1"),
        (["--slo", "ttft=1"], "ttft_p95"),
        (["--slo", "ttft_p95=0"], "ttft_p95 must be a finite number of seconds above 0"),
        (["--slo", "icl_p95=1"], "icl_p95 is of all requests together"),
        (["--autoscale", "max_waiting=3"], "max_replicas"),
        (["--autoscale", "replicas=3"], "unknown key 'replicas'"),
        (["--replicas", "2", "--concurrency", "3"], "--concurrency is for one replica"),
        (["--modes", "inflight,fast"], "mode must be one of"),
        (["--engine", "max_slots=3"], "unknown key 'max_slots'"),
        (["--validate"], "leave out --costs"),
        (["--validate", "--rate", "3"], "leave out --rate"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs_argument = [] if "--costs" in arguments else ["--costs", costs]
    assert main(["simulate", *costs_argument, *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--num-requests", "--replicas", "--concurrency", "--num-kv-blocks"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5"])
def test_counts_are_whole_and_at_least_1(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", f"{flag}={value}"])
    assert f"{flag}: must be a whole number of at least 1, not '{value}'" in capsys.readouterr().err


# a machine on which nothing disturbs the measurement
PRECISE = MeasuredCostModel(
    ((1, 0.0), (8, 0.004), (512, 0.2)), 0.02, per_decode_row_s=5e-4, per_decode_context_s=2e-6, per_prefill_pair_s=1e-7
)


def serve_precisely(options: ServerOptions, mode: str, workloads: list[Workload], path: Path) -> Any:
    """As `validation._serve`, of engines whose steps take what PRECISE says, to the microsecond."""
    config = replace(engine_config(replace(options, mode=mode)), prefix_caching=False)
    num_blocks = 500
    scheduler = build_scheduler(config, num_blocks)
    runner = HashRunner(num_blocks, config.block_size)
    trace = StepTrace(path, config, num_blocks)
    now, parts = 100.0, []
    for workload in workloads:
        sent_s, chunks = now, {}
        for index, item in enumerate(workload.items):
            # in closed modes, batches of the places that Triton would form of what waits
            batch_id = len(parts) * 1000 + index // 8
            request = make_request(range(1, item.num_prompt_tokens + 1), item.max_tokens, batch_id=batch_id)
            scheduler.add(request, now)
            chunks[request.request_id] = []
        while scheduler.has_work:
            output = scheduler.schedule(now)
            end_s = now + PRECISE.step_time_s(output)
            trace.record_step(output, now, end_s)
            now = end_s
            for update in scheduler.update(output, runner.execute(output)):
                chunks[update.request_id].append(Chunk(now, 1))
        parts.append(
            validation.Part(
                workload,
                tuple(
                    RequestRecord(index, sent_s, own[-1].time_s, item.num_prompt_tokens, tuple(own))
                    for index, (item, own) in enumerate(zip(workload.items, chunks.values(), strict=True))
                ),
            )
        )
        now += 5
    trace.close()
    return parts, read_trace(path)


def test_what_nothing_disturbs_is_predicted_to_a_few_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "prepare_model", lambda options: None)
    monkeypatch.setattr(
        validation,
        "_serve",
        lambda options, mode, workloads: serve_precisely(options, mode, workloads, tmp_path / mode),
    )
    results = tmp_path / "results.json"
    arguments = ["--scale", "0.1", "--modes", "static,inflight", "--json", str(results)]
    assert main(["simulate", "--validate", *arguments]) == 0
    for result in json.loads(results.read_text()):
        for name, ratio in result["ratios"].items():
            assert ratio == pytest.approx(1, abs=0.03), (result["mode"], name)
    assert "all within 15%" in capsys.readouterr().out


def test_the_predicted_run_is_not_among_the_steps_that_costs_are_fitted_to(tmp_path: Path) -> None:
    workloads = [seed_workload(num, 0.05, seed) for num, seed in ((8, 1), (16, 0), (8, 2))]
    parts, trace = serve_precisely(ServerOptions(default_repository()), "inflight", workloads, tmp_path / "trace")
    of_parts = [part.steps_of(trace) for part in parts]
    assert [step for steps in of_parts for step in steps] == list(trace.steps)
    ids = [{row.request_id for step in steps for row in step.rows} for steps in of_parts]
    assert [len(own) for own in ids] == [8, 16, 8]
    assert not ids[1] & (ids[0] | ids[2])


@pytest.mark.slow
def test_validation_on_a_real_server(tmp_path: Path) -> None:
    """How close it comes is for an idle machine to show; here only that all of it runs."""
    results = tmp_path / "results.json"
    arguments = ["--scale", "0.05", "--num-requests", "12", "--modes", "inflight", "--json", str(results)]
    assert main(["simulate", "--validate", *arguments]) == 0
    (result,) = json.loads(results.read_text())
    assert result["num_steps"] > 20
    for side in ("measured", "predicted"):
        assert result[side]["summary"]["all"]["outcomes"] == {"finished": 12}
    assert all(ratio > 0 for ratio in result["ratios"].values())


def test_laws_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError, match="exponential:MEAN:CAP"):
        sim_options.parse_law("exponential:3")


def test_costs_are_kept_by_model_and_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(model="/models/big.gguf", dtype="bfloat16")
    assert sim_options.default_costs_path(config) == tmp_path / "noria" / "calibration" / "big-bfloat16.json"
