"""Prompts have exactly the tokens asked for, by the embedded model's tokenizer and others, and share what they may."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import Metaspace

from noria.models.model_store import resolve_model
from noria_bench.errors import BenchError
from noria_bench.prompts import (
    HuggingFaceTokenizer,
    PromptWriter,
    Span,
    TextTokenizer,
    TokenPrompts,
    WordPrompts,
    count_tokens,
    cut_text,
    lead_words,
    load_tokenizer,
    read_text,
)
from support.byte_tokenizer import ByteTokenizer

TEXT = read_text()


def metaspace_tokenizer() -> TextTokenizer:
    """Like Llama 2's: a space is put before a text, and taken from it again, so that ids hide where a word ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=900, show_progress=False))
    return HuggingFaceTokenizer(tokenizer)


@pytest.fixture(scope="module")
def embedded() -> TextTokenizer:
    return load_tokenizer(resolve_model("embedded", None, "float32", print))


@pytest.fixture(scope="module", params=["embedded", "metaspace", "bytes"])
def tokenizer(request: pytest.FixtureRequest, embedded: TextTokenizer) -> TextTokenizer:
    if request.param == "embedded":
        return embedded
    return metaspace_tokenizer() if request.param == "metaspace" else ByteTokenizer()


@pytest.fixture(scope="module")
def writer(tokenizer: TextTokenizer) -> TokenPrompts:
    return TokenPrompts(tokenizer, TEXT, seed=0)


def test_every_length_is_exact(tokenizer: TextTokenizer, writer: TokenPrompts) -> None:
    for num_tokens in (*range(1, 150), 511, 512, 513, 6000):
        assert len(tokenizer.encode(writer.write([Span(num_tokens, num_tokens)]))) == num_tokens


def test_a_shared_prefix_is_shared_by_token_ids_and_nothing_more(
    tokenizer: TextTokenizer, writer: TokenPrompts
) -> None:
    for num_shared in (1, 5, 16, 63, 64, 65):
        prompts = [tokenizer.encode(writer.write([Span(-1, num_shared), Span(one, 2 + one)])) for one in range(20)]
        assert [len(ids) for ids in prompts] == [num_shared + 2 + one for one in range(20)]
        assert len({tuple(ids[:num_shared]) for ids in prompts}) == 1
        # of bytes, the first is the space between them
        assert len({tuple(ids[num_shared : num_shared + 2]) for ids in prompts}) == 20
        if not isinstance(tokenizer, ByteTokenizer):
            assert len({ids[num_shared] for ids in prompts}) == 20


def test_chains_of_blocks_share_what_they_have_in_common(tokenizer: TextTokenizer, writer: TokenPrompts) -> None:
    one = tokenizer.encode(writer.write([Span(-1, 32), Span(-2, 32), Span(-3, 20)]))
    two = tokenizer.encode(writer.write([Span(-1, 32), Span(-2, 32), Span(-4, 32), Span(7, 3)]))
    assert (len(one), len(two)) == (84, 99)
    assert one[:64] == two[:64]
    assert one[64:66] != two[64:66]
    assert one == tokenizer.encode(writer.write([Span(-1, 32), Span(-2, 32), Span(-3, 20)]))


def test_a_shorter_span_begins_like_a_longer_one(embedded: TextTokenizer) -> None:
    writer = TokenPrompts(embedded, TEXT, seed=0)
    long = embedded.encode(writer.write([Span(-1, 64)]))
    for num_tokens in range(20, 64):
        short = embedded.encode(writer.write([Span(-1, num_tokens)]))
        assert short[: num_tokens - 8] == long[: num_tokens - 8]


def test_prompts_differ_from_their_first_token_on(embedded: TextTokenizer) -> None:
    writer = TokenPrompts(embedded, TEXT, seed=0)
    prompts = [embedded.encode(writer.write([Span(one, 3)])) for one in range(2000)]
    num_leads = len(writer._leads)
    assert 500 < num_leads < 2000
    assert len({ids[0] for ids in prompts[:num_leads]}) == num_leads
    assert len({tuple(ids[:2]) for ids in prompts}) == 2000


def test_another_seed_gives_other_prompts(embedded: TextTokenizer) -> None:
    one, same, other = (TokenPrompts(embedded, TEXT, seed).write([Span(0, 50)]) for seed in (1, 1, 2))
    assert one == same != other


def test_a_users_text_may_be_in_any_language(embedded: TextTokenizer, tmp_path: Path) -> None:
    """Characters of several tokens each: a cut within one is not what its tokens say."""
    path = tmp_path / "text.txt"
    path.write_text(
        "Вода, текущая с горы, вращает колесо; 水車 поворачивает жёрнов и мелет зерно до самого утра. " * 12
    )
    writer = TokenPrompts(embedded, read_text(path), seed=0)
    for num_tokens in range(2, 60):
        prompt = writer.write([Span(num_tokens, num_tokens)])
        assert len(embedded.encode(prompt)) == num_tokens
        assert "�" not in prompt


def test_a_text_that_is_too_short_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(BenchError, match="text: cannot read"):
        read_text(path)
    path.write_text("too short")
    with pytest.raises(BenchError, match="must hold at least 100 words"):
        read_text(path)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        load_tokenizer(tmp_path)


class MergingTokenizer(ByteTokenizer):
    """Merges a letter with a space after it: what a text's tokens are depends on what follows."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for one in super().encode(text):
            if ids and one == ord(" ") and ids[-1] < 256:
                ids[-1] += 256
            else:
                ids.append(one)
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
        return "".join(chr(one - 256) + " " if one >= 256 else chr(one) for one in token_ids)


def test_a_tokenizer_with_which_prefixes_cannot_be_shared_is_refused_rather_than_off_by_some() -> None:
    tokenizer = MergingTokenizer()
    writer = TokenPrompts(tokenizer, TEXT, seed=0)
    assert len(tokenizer.encode(writer.write([Span(0, 50)]))) == 50
    with pytest.raises(BenchError, match="this tokenizer"):
        writer.write([Span(-1, 20), Span(0, 20)])


def test_without_a_tokenizer_a_token_is_a_word_or_a_full_stop() -> None:
    writer: PromptWriter = WordPrompts(seed=0)

    def words(*spans: Span) -> list[str]:
        return writer.write(spans).replace(".", " .").split()

    assert [len(words(Span(0, num_tokens))) for num_tokens in (1, 2, 13, 14, 300)] == [1, 2, 13, 14, 300]
    assert len({words(Span(one, 5))[0] for one in range(100)}) == 100
    one, two = words(Span(-1, 20), Span(0, 9)), words(Span(-1, 20), Span(1, 9))
    assert (len(one), len(two)) == (29, 29)
    assert one[:20] == two[:20]
    assert one[20] != two[20]


def test_words_of_common_use_are_about_a_token_each(embedded: TextTokenizer) -> None:
    prompt = WordPrompts(seed=0).write([Span(0, 500)])
    assert len(embedded.encode(prompt)) == pytest.approx(500, rel=0.02)


def test_no_identity_has_the_lead_words_of_another() -> None:
    words = [str(number) for number in range(7)]
    leads = [tuple(lead_words(words, identity, 2)) for identity in range(-20, 29)]
    assert len(set(leads)) == len(leads) == 49
    assert len({lead[0] for lead in leads[:7]}) == 7


def test_texts_are_cut_to_at_most_so_many_tokens(tokenizer: TextTokenizer) -> None:
    text = TEXT[:600]
    assert cut_text(text, 10**6, tokenizer) == text
    for num_tokens in random.Random(0).sample(range(1, count_tokens(text, tokenizer)), 20):
        cut = cut_text(text, num_tokens, tokenizer)
        assert text.startswith(cut)
        assert num_tokens - 8 <= count_tokens(cut, tokenizer) <= num_tokens
    assert count_tokens("12345", None) == 2
    assert cut_text("12345678", 1, None) == "1234"
