"""`noria tune`: the files that it writes are read by the server and hold what was found; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from noria.cli import main
from noria.commands.tuned_files import engine_json, model_config
from noria.config import EngineConfig, PriorityClass
from noria.config_sources import load_engine_config
from noria.serving.server import default_repository
from noria.simulation.batch_former import DynamicBatching
from noria.simulation.cost_model import MeasuredCostModel
from noria.simulation.trial import Bench

SHORT = ("--workload", "constant:3", "--prompt-tokens", "constant:8", "--num-requests", "10")
CONFIGS = default_repository() / "llm" / "configs"


def tune(tmp_path: Path, costs: MeasuredCostModel, *arguments: str) -> int:
    path = tmp_path / "costs.json"
    costs.save(path)
    return main(["tune", "--costs", str(path), "--num-kv-blocks", "40", "--output", str(tmp_path / "out"), *arguments])


def parse_pbtxt(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_files_hold_the_configuration_with_the_highest_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "num_requests", lambda self, rate, is_long: 120)
    # a step takes a second, and one more for each sequence that decodes: at most two of them may
    costs = MeasuredCostModel(((1, 0.0),), constant_s=1.0, per_decode_row_s=1.0)
    limits = ("--slo", "tpot_p95=3", "--modes", "inflight", "--num-kv-blocks", "4")
    assert tune(tmp_path, costs, *limits, *SHORT) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [path.name for path in written] == ["engine.json", "config.pbtxt", "tuned.json"]
    config = load_engine_config(written[0])
    assert (config.batching_mode, config.max_num_seqs, config.num_kv_blocks) == ("inflight", 2, 4)
    assert parse_pbtxt(written[1].read_text()) == parse_pbtxt((CONFIGS / "inflight.pbtxt").read_text())
    predicted = json.loads(written[2].read_text())
    assert predicted["requests_per_s"] == min(predicted["highest_requests_per_s_by_seed"])
    # two requests take 1 s for their prompts and first tokens, and 3 s for each of the other two
    assert 0.2 < predicted["requests_per_s"] < 1.2 * 2 / 7
    assert len(predicted["seconds_by_seed"]) == 3
    assert all(0 < figures["tpot_p95"] <= 3 for figures in predicted["seconds_by_seed"])
    assert predicted["front"][0]["engine"]["max_num_seqs"] == 2


def test_what_no_configuration_keeps_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_second = MeasuredCostModel(((1, 1.0),))
    assert tune(tmp_path, one_second, "--slo", "ttft_p95=9,tpot_mean=0.25", "--modes", "dynamic", *SHORT) == 1
    assert "tpot_mean=1, 4 times what is asked for (dynamic: batches of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slo", "ttft_p90=2"), "--slo takes KEY=SECONDS"),
        (("--slo", "ttft_p95=2", "--modes", "inflight,orca"), "--modes must be of static, dynamic, inflight"),
        (("--slo", "ttft_p95=2", "--rate", "3"), "leave out --rate"),
        (("--slo", "ttft_p95=2", "--workload", "constant:2000"), "more than the 640 that fit"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tune(tmp_path, MeasuredCostModel(((1, 1.0),)), *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_engine_json_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_blocks=100,
        max_prefill_tokens=32,
        priority_classes={1: PriorityClass(max_queue_size=4), 3: PriorityClass(default_timeout_s=2.0)},
    )
    values = engine_json(config, stated=("max_num_seqs",))
    assert values["max_num_seqs"] == 8
    assert "max_queue_size" not in values
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(values))
    assert load_engine_config(path) == config


def test_a_closed_modes_config_gets_its_batches_and_keeps_the_rest() -> None:
    before = parse_pbtxt((CONFIGS / "dynamic.pbtxt").read_text())
    after = parse_pbtxt(model_config(CONFIGS / "dynamic.pbtxt", DynamicBatching(16, (4, 16), 0.02), "a test"))
    assert after.max_batch_size == 16
    assert list(after.dynamic_batching.preferred_batch_size) == [4, 16]
    assert after.dynamic_batching.max_queue_delay_microseconds == 20_000
    before.max_batch_size = 16
    before.dynamic_batching.CopyFrom(after.dynamic_batching)
    assert after == before
