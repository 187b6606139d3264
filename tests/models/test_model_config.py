from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from noria.errors import ConfigError
from noria.models.model_config import ModelConfig, load_model_config
from noria.models.rope_scaling import LinearRopeScaling, Llama3RopeScaling, RopeFactors
from support.tiny_models import FAMILIES, tiny_config, tiny_model_dir

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_dict(family: str, **overrides):
    config = json.loads(tiny_config(family).to_json_string(use_diff=False))
    config["architectures"] = [type(tiny_config(family)).__name__.replace("Config", "ForCausalLM")]
    return config | overrides


@pytest.mark.parametrize("family", FAMILIES)
def test_from_hf_agrees_with_transformers_on_every_field(tmp_path, family):
    tiny_model_dir(tmp_path, family, tied=family != "mistral")
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    assert ours.family == theirs.model_type
    for our_name, their_name in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
        "max_position_embeddings": "max_position_embeddings",
        "bos_token_id": "bos_token_id",
    }.items():
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name
    assert ours.head_dim == (32 if family == "qwen3" else 16)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.eos_token_ids == (1,)
    assert ours.sliding_window is None
    assert (ours.attention_bias, ours.attention_output_bias) == (family == "qwen2", False)
    assert ours.has_qk_norm == (family == "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_to_hf_is_read_back_by_us_and_by_transformers(tmp_path, family):
    config = ModelConfig.from_hf(hf_dict(family))
    written = config.to_hf("bfloat16")
    assert ModelConfig.from_hf(json.loads(json.dumps(written))) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == config.family
    assert theirs.dtype == torch.bfloat16
    assert ModelConfig.from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4.0}, LinearRopeScaling(4.0)),
        (LLAMA3, Llama3RopeScaling(32.0, 1.0, 4.0, 8192)),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 4 for i in range(32)],
                "long_factor": [1.0 + i / 4 for i in range(32)],
                "attention_factor": 1.0,
                "original_max_position_embeddings": 512,
            },
            RopeFactors(tuple(1.0 + i / 4 for i in range(32))),
        ),
    ],
    ids=["default", "linear", "llama3", "factors"],
)
def test_inverse_frequencies_are_those_of_transformers(rope, scaling):
    theirs = tiny_config("llama", head_dim=64, rope_parameters={"rope_theta": 500000.0} | rope)
    ours = ModelConfig.from_hf(
        theirs.to_dict() | {"architectures": ["LlamaForCausalLM"], "rope_parameters": theirs.rope_parameters}
    )
    assert ours.rope_scaling == scaling
    if rope["rope_type"] == "default":
        expected = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).double() / 64)
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, device="cpu")
        assert attention_factor == 1.0
    torch.testing.assert_close(torch.tensor(ours.inv_freq()).float(), expected.float(), rtol=1e-6, atol=0)
    assert ModelConfig.from_hf(ours.to_hf("float32")) == ours


def test_rope_of_transformers_4_is_read():
    config = hf_dict("llama", rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
    del config["rope_parameters"]
    ours = ModelConfig.from_hf(config)
    assert (ours.rope_theta, ours.rope_scaling) == (500000.0, LinearRopeScaling(2.0))
    assert ModelConfig.from_hf(config | {"rope_scaling": LLAMA3}).rope_scaling == Llama3RopeScaling(
        32.0, 1.0, 4.0, 8192
    )
    assert ModelConfig.from_hf(config | {"rope_scaling": None, "rope_theta": None}).rope_theta == 10000.0


def test_fields_that_old_configs_leave_out_take_the_defaults_of_transformers():
    config = hf_dict("llama")
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "mlp_bias"):
        del config[name]
    ours = ModelConfig.from_hf(config)
    assert (ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps, ours.tie_word_embeddings) == (4, 16, 1e-6, False)


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 512}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}, 64),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28, "layer_types": None},
            None,
        ),
        ("llama", {"sliding_window": 64}, None),
    ],
)
def test_sliding_window_is_there_only_if_it_is_used(family, fields, window):
    assert ModelConfig.from_hf(hf_dict(family, **fields)).sliding_window == window


def test_a_window_in_only_some_layers_is_refused():
    config = hf_dict("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1, layer_types=None)
    with pytest.raises(ConfigError, match=r"max_window_layers must be 0 or at least num_hidden_layers \(2\), not 1"):
        ModelConfig.from_hf(config)
    with pytest.raises(ConfigError, match="layer_types must be the same for all layers"):
        ModelConfig.from_hf(config | {"layer_types": ["full_attention", "sliding_attention"]})


def test_eos_of_generation_config_replaces_that_of_config(tmp_path):
    tiny_model_dir(tmp_path, "llama")
    assert load_model_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert load_model_config(tmp_path).eos_token_ids == (3, 1)
    (tmp_path / "generation_config.json").unlink()
    assert load_model_config(tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures must be one of LlamaForCausalLM, .*GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, not 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config must be absent"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type must be default, linear or llama3, not 'yarn'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type must be .*'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be present"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor must be above low_freq_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
            "long_factor must be the same as short_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"vocab_size": None}, "vocab_size must be present"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 304}, r"eos_token_id must be below vocab_size \(304\)"),
    ],
)
def test_what_is_not_supported_is_named(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(hf_dict("llama", **fields))
    assert str(caught.value).startswith("config.json: ")


def test_missing_and_malformed_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model_config(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model_config(tmp_path)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig.from_hf(hf_dict("llama")).num_layers = 3
