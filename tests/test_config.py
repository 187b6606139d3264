"""EngineConfig from its sources, and the configs of the model repository."""

import re
from pathlib import Path

import pytest

from noria.config import EngineConfig
from noria.config_sources import load_engine_config
from noria.errors import ConfigError
from noria.serving.server import default_repository
from noria.serving.service import check_numpy, read_configs

LLM = default_repository() / "llm"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(text)
    return path


def test_later_sources_go_over_earlier_ones(tmp_path: Path) -> None:
    path = write(tmp_path, '{"block_size": 32, "max_num_seqs": 2, "kv_cache_gib": 2}')
    config = load_engine_config(path, {"max_num_seqs": "3", "kv_cache_gib": "0.5"}, '{"kv_cache_gib": 4}')
    assert (config.block_size, config.max_num_seqs, config.kv_cache_gib) == (32, 3, 4.0)
    assert config.max_queue_size == EngineConfig().max_queue_size


def test_null_takes_a_limit_away_and_only_where_there_may_be_none(tmp_path: Path) -> None:
    assert load_engine_config(write(tmp_path, '{"max_model_len": null}')).max_model_len is None
    assert load_engine_config(None, {"num_kv_blocks": "null"}).num_kv_blocks is None
    with pytest.raises(ConfigError, match="block_size must be a whole number, not None"):
        load_engine_config(write(tmp_path, '{"block_size": null}'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_batch": 1}', "engine.json: unknown key 'max_batch'; valid are model, batching_mode"),
        ('{"max_num_seqs": 0}', "max_num_seqs must be from 1 to 4096, not 0"),
        ('{"max_num_seqs": true}', "engine.json: max_num_seqs must be a whole number, not True"),
        ('{"max_num_seqs": 1.5}', "max_num_seqs must be a whole number, not 1.5"),
        ('{"kv_cache_gib": NaN}', "kv_cache_gib must be from 0.001 to 1024, not nan"),
        ('{"dtype": "int4"}', "dtype must be one of float32, bfloat16, float16, not 'int4'"),
        ('{"batching_mode": "continuous"}', "batching_mode must be one of inflight, static, dynamic"),
        ('{"model": 7}', "model must be a string, not 7"),
        ('{"model": ""}', "model must be 'embedded'"),
        (
            '{"max_num_seqs": 64, "max_num_batched_tokens": 32}',
            "max_num_batched_tokens .32. must be at least",
        ),
        ("[]", "engine.json must hold a JSON object, not list"),
        ('{"model": ', "engine.json is not valid JSON"),
    ],
)
def test_a_bad_value_is_named_with_what_is_valid(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine_config(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.json"):
        load_engine_config(tmp_path / "nowhere.json")


def test_the_engine_file_of_the_repository_is_valid() -> None:
    assert load_engine_config(LLM / "1" / "engine.json") == EngineConfig()


def test_every_config_has_the_same_tensors_and_the_default_is_in_flight() -> None:
    texts = {path.stem: path.read_text() for path in (LLM / "configs").glob("*.pbtxt")}
    assert set(texts) == {"inflight", "static", "dynamic", "static_unary", "dynamic_unary"}
    assert (LLM / "config.pbtxt").read_text() == texts["inflight"]
    tensors = {text[text.index("\ninput [") :] for text in texts.values()}
    assert len(tensors) == 1
    assert not [text for text in texts.values() if not re.search(r'^name: "llm"$', text, re.MULTILINE)]


def model_config(**changes: object) -> dict[str, object]:
    return {
        "max_batch_size": 6,
        "model_transaction_policy": {"decoupled": True},
        "parameters": {"batching_mode": {"string_value": "static"}},
        "instance_group": [{"count": 1}],
    } | changes


def test_in_a_closed_mode_the_slots_are_the_maximal_batch_size() -> None:
    config, mode = read_configs(model_config(), LLM / "1" / "engine.json", None)
    assert config.max_num_seqs == 6
    assert mode.is_closed
    assert mode.is_batched


def test_a_numpy_that_damages_strings_is_refused() -> None:
    check_numpy("1.26.4")
    with pytest.raises(ConfigError, match=r"numpy must be below 2 in Triton's stub, not 2\.4\.6"):
        check_numpy("2.4.6")


def test_what_cannot_work_together_is_refused() -> None:
    in_flight = {"parameters": {"batching_mode": {"string_value": "inflight"}}}
    with pytest.raises(ConfigError, match="inflight needs model_transaction_policy"):
        read_configs(model_config(**in_flight, model_transaction_policy={}), LLM / "1" / "engine.json", None)
    with pytest.raises(ConfigError, match="instance_group must have one instance, not 2"):
        read_configs(model_config(instance_group=[{"count": 2}]), LLM / "1" / "engine.json", None)
