from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from noria.errors import ConfigError
from noria.models.model_config import load_model_config
from noria.models.safetensors_loader import load_weights
from noria.models.weights import check_weights, expected_weights
from support.tiny_models import FAMILIES, tiny_model, tiny_model_dir

UP = "model.layers.1.mlp.up_proj.weight"


def load(directory, dtype=torch.float32):
    return load_weights(directory, load_model_config(directory), dtype, "cpu")


def change(directory, edit):
    """Rewrites the one safetensors file after `edit` changed the dict of its tensors."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_loaded_bit_for_bit(tmp_path, family, tied, sharded):
    tiny_model_dir(tmp_path, family, tied=tied, sharded=sharded)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or sharded
    expected = dict(tiny_model(family, tie_word_embeddings=tied).named_parameters())
    weights = load(tmp_path)
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def test_biases_of_llama_are_expected_when_its_config_says_so(tmp_path):
    tiny_model_dir(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert {"model.layers.1.self_attn.o_proj.bias", "model.layers.0.mlp.down_proj.bias"} <= set(load(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_asked_dtype(tmp_path, dtype):
    tiny_model_dir(tmp_path, "llama")
    originals = load(tmp_path)
    for name, tensor in load(tmp_path, dtype).items():
        assert torch.equal(tensor, originals[name].to(dtype))


def test_weights_outlive_the_file_that_they_came_from(tmp_path):
    tiny_model_dir(tmp_path, "llama")
    weights = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(weights[UP], tiny_model("llama").state_dict()[UP])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(UP), f"missing: {UP}"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "left over: extra"),
        (
            lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()}),
            rf"misshapen: {UP} is \[95, 64\], not \[96, 64\]",
        ),
        (lambda tensors: tensors.update({UP: tensors[UP].char()}), f"{UP} must be one of F32, F16, BF16, not I8"),
    ],
    ids=["missing", "left over", "misshapen", "integers"],
)
def test_weights_that_do_not_fit_the_config_are_named(tmp_path, edit, message):
    tiny_model_dir(tmp_path, "llama")
    change(tmp_path, edit)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_all_problems_are_listed_at_once_and_long_lists_are_cut(tmp_path):
    config = load_model_config(tiny_model_dir(tmp_path, "qwen3"))
    found = {"surplus": (1,), "model.norm.weight": (65,)}
    with pytest.raises(
        ConfigError, match=r"missing: lm|missing: model.* and \d+ more; left over: surplus; misshapen: model.norm"
    ):
        check_weights(found, config)


def test_rotary_buffers_of_old_checkpoints_are_dropped(tmp_path):
    tiny_model_dir(tmp_path, "llama")
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    weights = load(tmp_path)
    assert set(weights) == set(expected_weights(load_model_config(tmp_path)))


def test_a_tied_head_may_be_stored_again_but_not_differ(tmp_path):
    tiny_model_dir(tmp_path, "llama")
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(tmp_path)
    change(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(tmp_path)


def test_an_untied_head_must_be_there(tmp_path):
    tiny_model_dir(tmp_path, "llama", tied=False)
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:4],
        lambda content: b"",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"}" + content[9:],
        lambda content: content + b"more",
    ],
    ids=["half", "one byte short", "no header", "empty", "huge header", "no JSON", "too long"],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tiny_model_dir(tmp_path, "llama") / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors: not a whole safetensors file"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    tiny_model_dir(tmp_path, "llama", sharded=True)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} is missing"):
        load(tmp_path)


def test_a_weight_in_two_shards_is_refused(tmp_path):
    tiny_model_dir(tmp_path, "llama", sharded=True)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"which another file of .* holds too"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, None, {UP: "../model.safetensors"}, {UP: "pytorch_model.bin"}])
def test_an_index_that_names_no_safetensors_beside_it_is_refused(tmp_path, weight_map):
    tiny_model_dir(tmp_path, "llama", sharded=True)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="weight_map must"):
        load(tmp_path)


def test_a_pickle_is_never_read(tmp_path):
    tiny_model_dir(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"safetensors and \.gguf files only, never from a pickle"):
        load(tmp_path)
