from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from noria.errors import ConfigError, InvalidRequest
from noria.models.tokenizer import load_tokenizer
from support.tiny_models import FAMILIES, save_tiny_tokenizer, tiny_model_dir

TEXTS = [
    "the other thing",
    "  two  spaces, tab\tand\nlines\n\n",
    "naïve café 日本語 \U0001f600 1234.5",
    "<|im_start|>user\nhi<|im_end|>",
    " don't stop ,  now !",
    "",
]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé <b>?"}]


@pytest.fixture
def directory(tmp_path):
    save_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_are_those_of_transformers(tmp_path_factory, family, text):
    directory = tiny_model_dir(tmp_path_factory.mktemp(family), family)
    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ids[0] == 0
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ours.encode(text)[1:], skip_special_tokens=False) == text


def test_chat_is_that_of_transformers_with_one_bos(directory):
    ids = load_tokenizer(directory).encode_chat(CHAT)
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(0) == 1
    assert theirs.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_ids_that_others_need_are_known(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 304
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}


def test_a_cut_character_decodes_to_replacement_characters(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("日")[1:]
    assert len(ids) == 3
    assert set(tokenizer.decode(ids[:2])) == {"\ufffd"}
    assert tokenizer.decode(ids) == "日"


def test_spaces_before_punctuation_are_kept_whatever_the_files_say(directory):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("no , really !")[1:]) == "no , really !"


def test_truncation_and_padding_left_in_the_file_are_not_applied(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<|eos|>",
    }
    path.write_text(json.dumps(content))
    assert len(load_tokenizer(directory).encode("xxxxxxxxxx")) == 11


def test_a_tokenizer_without_bos_adds_none(tmp_path):
    save_tiny_tokenizer(tmp_path, add_bos=False)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("") == []
    assert tokenizer.encode_chat(CHAT).count(0) == 1


def test_threads_may_encode_and_decode_at_once(directory):
    tokenizer = load_tokenizer(directory)
    texts = [f"the {number} threads {'é日 ' * number}" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        round_trips = pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts * 8)
        chats = pool.map(lambda text: tokenizer.encode_chat([{"role": "user", "content": text}]), texts)
        assert list(round_trips) == texts * 8
        assert [tokenizer.decode(ids) for ids in chats] == [f"user\n{text}\nassistant\n" for text in texts]


def test_a_chat_without_a_template_is_the_fault_of_the_request(directory):
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="apply_chat_template must be false: this model has no chat template"):
        load_tokenizer(directory).encode_chat(CHAT)


def test_what_a_template_refuses_is_the_fault_of_the_request(directory):
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="does not take these messages: roles must alternate"):
        load_tokenizer(directory).encode_chat(CHAT)


def test_a_missing_or_damaged_file_is_named(directory):
    path = directory / "tokenizer.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(ConfigError, match=f"cannot read the tokenizer of {directory}"):
        load_tokenizer(directory)
    path.unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        load_tokenizer(directory)
