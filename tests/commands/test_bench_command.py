"""What `noria bench` makes of its arguments, before any server is started."""

from __future__ import annotations

import argparse
import json

import pytest

from noria.commands.bench import add_bench
from noria.commands.bench_options import BenchOptions, bench_options
from noria_bench.errors import BenchError
from noria_bench.results import Capacity
from noria_bench.sweep import capacity_line


def options_of(*words: str) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    return bench_options(parser.parse_args(["bench", *words]))


def test_the_default_is_the_seed_mix_in_flight() -> None:
    options = options_of()
    assert options.workload_source == "seed"
    assert [(one.label, one.mode, dict(one.engine)) for one in options.variants()] == [("inflight", "inflight", {})]


def test_modes_and_variants_are_compared_in_one_go() -> None:
    options = options_of("--modes", "static,inflight", "--variant", "swap:preemption=swap,num_host_blocks=64")
    assert [(one.label, one.mode, dict(one.engine)) for one in options.variants()] == [
        ("static", "static", {}),
        ("inflight", "inflight", {}),
        ("swap", "inflight", {"preemption": "swap", "num_host_blocks": 64}),
    ]
    (wide,) = options_of("--variant", "wide@static:").variants()
    assert (wide.label, wide.mode, dict(wide.engine)) == ("wide", "static", {})


def test_options_survive_a_result() -> None:
    options = options_of("exponential:20:64", "--rate", "0.5", "--slo", "cpu", "--repeat", "3", "--modes", "static")
    assert BenchOptions.from_json(json.loads(json.dumps(options.to_json()))).to_json() == options.to_json()
    assert BenchOptions.from_json(options.to_json()).spec() == options.spec()


def test_a_running_server_is_measured_as_it_is() -> None:
    options = options_of("--url", "host:9001", "--metrics-url", "host:9002")
    assert options.variants() == []
    assert (options.http_url, options.metrics_url) == ("host:8000", "host:9002")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rate", "1", "--concurrency", "2"], "--rate makes an open loop and --concurrency a closed one"),
        (["--sweep", "1:2"], "--sweep needs --slo"),
        (["--sweep", "2:1", "--slo", "cpu"], "--sweep takes LOW:HIGH"),
        (["--sweep", "1:nan", "--slo", "cpu"], "--sweep takes LOW:HIGH"),
        (["--sweep", "1:2", "--slo", "cpu", "--rate", "1"], "--sweep looks for the rate itself"),
        (["--metrics-url", "a:1"], "are of the server that --url names"),
        (["--modes", "static,static"], "must have different names"),
        (["--variant", "swap"], "--variant takes NAME"),
        (["--variant", "a/b:x=1"], "--variant takes NAME"),
        (["--variant", "a:x"], "--variant takes NAME"),
        (["--variant", "a:=1"], "--variant takes NAME"),
        (["gone.yaml"], "gone.yaml"),
        (["--slo", "ttft=1"], "--slo takes KEY=SECONDS"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(words: list[str], reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        options_of(*words)


@pytest.mark.parametrize(
    "words", [["--rate", "0"], ["--rate", "inf"], ["--repeat", "0"], ["--repeat", "1.5"], ["--scale", "-1"]]
)
def test_numbers_are_checked_where_they_are_typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(*words)
    assert f"argument {words[0]}: must be a" in capsys.readouterr().err


def test_a_replay_of_a_newer_result_is_refused_by_name() -> None:
    with pytest.raises(BenchError, match="does not know the argument 'weather'"):
        BenchOptions.from_json({**options_of().to_json(), "weather": "fine"})


def test_capacities_in_words() -> None:
    found = Capacity("inflight", "cpu", 0.42, 0.38, 0.46, True, "ttft_p95", 9, num_repeats=3)
    assert capacity_line(found).startswith("inflight: 0.42 requests/s (95 % interval 0.38 to 0.46) keep cpu;")
    assert "ttft_p95 breaks at the lowest rate" in capacity_line(
        Capacity("static", "cpu", None, None, None, True, "ttft_p95", 1)
    )
    assert "at least 5 requests/s" in capacity_line(Capacity("x", "cpu", 5.0, 5.0, None, False, None, 4))
