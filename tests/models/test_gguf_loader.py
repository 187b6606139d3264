from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from noria.errors import ConfigError
from noria.models.gguf_loader import TENSOR_TYPES, read_gguf
from noria.models.model_config import ModelConfig
from noria.models.rope_scaling import LinearRopeScaling, RopeFactors
from support.tiny_gguf import gguf_name, write_gguf
from support.tiny_models import tiny_config, tiny_model

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_is_read_back_bit_for_bit(tmp_path, family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", model)
    gguf = read_gguf(tmp_path / "tiny.gguf")
    weights = dict(gguf.weights())
    expected = dict(model.named_parameters())
    assert set(weights) == set(expected)
    assert gguf.num_weights == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(torch.from_numpy(np.array(weights[name])), tensor), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_config_is_that_of_the_model(tmp_path, family):
    model = tiny_model(family)
    write_gguf(tmp_path / "tiny.gguf", model)
    config = read_gguf(tmp_path / "tiny.gguf").config
    expected = ModelConfig.from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]}).to_hf("float32")
    written = config.to_hf("float32")
    # float32 in a GGUF file; the end of a turn ends a text too
    assert written.pop("rms_norm_eps") == pytest.approx(expected.pop("rms_norm_eps"))
    assert written.pop("eos_token_id") == [*expected.pop("eos_token_id"), 3]
    assert written == expected


def test_biases_of_llama_are_permuted_like_its_weights(tmp_path):
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "tiny.gguf", model)
    weights = dict(read_gguf(tmp_path / "tiny.gguf").weights())
    for name, tensor in model.named_parameters():
        assert torch.equal(torch.from_numpy(np.array(weights[name])), tensor), name


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_each_tensor_type_is_read_as_gguf_itself_dequantises_it(tmp_path, tensor_type):
    # rows of 256, the block of the K types
    model = tiny_model("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    stored = write_gguf(tmp_path / "tiny.gguf", model, tensor_type)
    for name, array in read_gguf(tmp_path / "tiny.gguf").weights():
        kept_type = tensor_type if array.ndim == 2 else "F32"
        expected = dequantize(stored[gguf_name(name)], GGMLQuantizationType[kept_type])
        assert array.dtype == np.float32
        assert array.shape == model.state_dict()[name].shape
        assert np.isfinite(array).all()
        assert np.array_equal(array, expected), name


@pytest.mark.parametrize(
    ("tensor_type", "tolerance"),
    [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.15), ("Q4_1", 0.15)],
)
def test_quantised_weights_are_near_the_original(tmp_path, tensor_type, tolerance):
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model, tensor_type)
    for name, array in read_gguf(tmp_path / "tiny.gguf").weights():
        original = model.state_dict()[name].numpy()
        assert np.abs(array - original).max() <= tolerance * np.abs(original).max(), name


def test_rope_factors_become_divisors_of_the_frequencies(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tensors={"rope_freqs.weight": factors})
    gguf = read_gguf(tmp_path / "tiny.gguf")
    assert gguf.config.rope_scaling == RopeFactors(tuple(factors.tolist()))
    assert "rope_freqs.weight" not in dict(gguf.weights())
    plain = ModelConfig.from_hf(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert gguf.config.inv_freq() == pytest.approx([f / d for f, d in zip(plain.inv_freq(), factors, strict=True)])


def test_linear_rope_scaling_is_read(tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata=scaling)
    assert read_gguf(tmp_path / "tiny.gguf").config.rope_scaling == LinearRopeScaling(4.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma2"}, "general.architecture must be one of llama, qwen2, qwen3, not 'gemma2'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be none or linear, not 'yarn'"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.rope.dimension_count": 8}, r"llama.rope.dimension_count must be the head size \(16\), not 8"),
        ({"llama.attention.value_length": 8}, r"llama.attention.value_length must be the head size \(16\)"),
        ({"llama.block_count": None}, "llama.block_count must be present"),
        ({"llama.block_count": 3}, r"missing: model\.layers\.2\."),
        ({"llama.embedding_length": 128}, "misshapen"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id must be below vocab_size"),
    ],
)
def test_metadata_that_is_not_supported_is_named(tmp_path, metadata, message):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama"), metadata=metadata)
    with pytest.raises(ConfigError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_gate.weight": None}, f"missing: {GATE}"),
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "left over: blk.0.attn_sinks.weight"),
        ({"blk.1.ffn_gate.weight": np.ones((96, 32), np.float32)}, rf"misshapen: {GATE} is \[96, 32\], not \[96, 64\]"),
        ({"token_embd.weight": None}, "holds no tensor token_embd.weight"),
    ],
    ids=["missing", "left over", "misshapen", "no embedding"],
)
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path, tensors, message):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tensors=tensors)
    with pytest.raises(ConfigError, match=message):
        read_gguf(tmp_path / "tiny.gguf")


def test_another_tensor_type_is_named(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "Q5_0")
    with pytest.raises(ConfigError, match=r"the type of \S+ must be one of F32, .*, not Q5_0"):
        read_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ConfigError, match=r"cannot read .*tiny\.gguf: not a whole GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("content", [b"GGML" + bytes(64), b"GGUF\x09\0\0\0" + bytes(64), b"not a model at all"])
def test_another_format_is_named(tmp_path, content):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*tiny\.gguf: not a whole GGUF file"):
        read_gguf(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tiny\.gguf is missing"):
        read_gguf(tmp_path / "tiny.gguf")
