"""Incremental text against the decoding of all tokens at once, cut by brute force before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from noria.engine.text import MAX_WINDOW, IncrementalText, TextTokenizer
from support.byte_tokenizer import BOS, EOS, ByteTokenizer

# how long an example takes depends on the machine's other load
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

BYTES = ByteTokenizer()
EMOJI = "😀"


class ChunkTokenizer:
    """One token per given chunk of bytes, each possibly a part of a character or several of them."""

    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks
        self.longest_decode = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest_decode = max(self.longest_decode, len(token_ids))
        return b"".join(self._chunks[token_id] for token_id in token_ids).decode(errors="replace")


class CompiledTokenizer:
    """A tokenizer of the `tokenizers` library in the engine's shape."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_token_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = tokenizer.get_vocab_size()

    def ids(self, tokens: Sequence[str]) -> list[int]:
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def byte_level_tokenizer() -> CompiledTokenizer:
    """Single bytes, and merges that end within a character, as a byte-level BPE learns them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in (" a", "ab", " the", "世"):
        vocab[spell.pre_tokenize_str(text)[0][0]] = len(vocab)
    four_bytes = spell.pre_tokenize_str("a" + EMOJI)[0][0]
    vocab[four_bytes[:3]] = len(vocab)
    vocab[four_bytes[3:]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return CompiledTokenizer(tokenizer)


WORDS = ["▁", "▁▁", "▁the", "▁a", "b", ".", "é", "世"]


def metaspace_tokenizer(decoder: Any) -> CompiledTokenizer:
    """SentencePiece's shape: ▁ for a space, tokens for words, and for the bytes of what has none."""
    vocab = {token: index for index, token in enumerate(["<unk>", *WORDS, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return CompiledTokenizer(tokenizer)


BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
LLAMA = metaspace_tokenizer(
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
)


def stream(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    stop: Sequence[str] = (),
    skip_special_tokens: bool = True,
    min_tokens: int = 0,
) -> tuple[list[str], str | None]:
    """The pieces that are released, one per token until a stop string and one at the end, and the stop string."""
    text = IncrementalText(tokenizer, stop, skip_special_tokens, min_tokens)
    pieces = []
    for token_id in token_ids:
        pieces.append(text.push(token_id))
        if text.stop_hit is not None:
            return pieces, text.stop_hit
    pieces.append(text.finish())
    return pieces, text.stop_hit


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], max(ending, key=len)
    return text, None


def split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Chunks of these sizes, over and over."""
    chunks = []
    start = 0
    while start < len(data):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(data[start : start + size])
        start += size
    return chunks


texts = st.text(st.sampled_from("ab .é世😀\ufffd\n"), max_size=40)
stops = st.lists(st.text(st.sampled_from("ab .é世😀\ufffd"), min_size=1, max_size=5), max_size=4)
chunk_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(texts, chunk_sizes, stops)
@example("xaab", [1], ["aab", "aaab"])
@example("a.b.ab", [2], [".b.b", "b.a"])
def test_pieces_join_to_the_whole_text_before_the_stop_string(text: str, sizes: list[int], stop: list[str]) -> None:
    chunks = split(text.encode(), sizes)
    pieces, hit = stream(ChunkTokenizer(chunks), range(len(chunks)), stop)
    assert ("".join(pieces), hit) == cut(text, stop)


@given(st.binary(max_size=60), chunk_sizes, stops)
@example(b"\xff\xff\xff\xf0\x9f\x98\x80", [1], [])
@example(b"\xf0\x9f\x98\xf0\x9f\x98\xe4\xb8\xf0\x9f\x98\x80a", [1], [])
def test_bytes_that_are_no_utf8_give_what_the_whole_decoding_gives(
    data: bytes, sizes: list[int], stop: list[str]
) -> None:
    chunks = split(data, sizes)
    pieces, hit = stream(ChunkTokenizer(chunks), range(len(chunks)), stop)
    assert ("".join(pieces), hit) == cut(data.decode(errors="replace"), stop)


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60), stops, st.booleans())
def test_special_tokens_are_left_out_or_shown(token_ids: list[int], stop: list[str], skip: bool) -> None:
    pieces, hit = stream(BYTES, token_ids, stop, skip_special_tokens=skip)
    assert ("".join(pieces), hit) == cut(BYTES.decode(token_ids, skip_special_tokens=skip), stop)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60), st.booleans())
def test_any_tokens_of_a_byte_level_tokenizer(token_ids: list[int], skip: bool) -> None:
    pieces, _ = stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [METASPACE, LLAMA], ids=["metaspace", "llama"])
@given(data=st.data())
@settings(max_examples=200)
def test_words_and_whole_characters_of_a_metaspace_tokenizer(tokenizer: CompiledTokenizer, data: st.DataObject) -> None:
    """What the whole decoding drops at the front (a space) is dropped once, and nowhere else."""
    parts = data.draw(
        st.lists(st.sampled_from([*WORDS, EOS, "as bytes é", "as bytes 世", "as bytes 😀", "as bytes \n"]))
    )
    tokens: list[str] = []
    for part in parts:
        is_spelled = part.startswith("as bytes ")
        tokens.extend([f"<0x{b:02X}>" for b in part.removeprefix("as bytes ").encode()] if is_spelled else [part])
    token_ids = tokenizer.ids(tokens)
    skip = data.draw(st.booleans())
    pieces, _ = stream(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_a_first_word_loses_the_space_that_metaspace_drops() -> None:
    assert stream(METASPACE, METASPACE.ids(["▁the", "▁a", "b"]))[0] == ["the", " a", "b", ""]


def test_ids_beyond_the_vocabulary_have_no_text_and_cost_later_words_nothing() -> None:
    token_ids = METASPACE.ids(["▁a"]) + [METASPACE.vocab_size + 5] * 30 + METASPACE.ids(["▁the"])
    assert "".join(stream(METASPACE, token_ids)[0]) == "a the"


def test_byte_fallback_that_takes_back_characters_neither_repeats_nor_loses_any() -> None:
    """The decoder turns a whole run of bytes into U+FFFD when its end is bad: what was shown stays as it was."""
    tokens = [*(f"<0x{b:02X}>" for b in "世é".encode()), "<0xF0>", "▁a", "b"]
    pieces, _ = stream(METASPACE, METASPACE.ids(tokens))
    assert pieces == ["", "", "世", "", "é", "", "\ufffd a", "b", ""]


@given(st.text(st.sampled_from("ab"), max_size=30), st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4)))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    state = IncrementalText(BYTES, stop, skip_special_tokens=True)
    released = ""
    for end in range(1, len(text) + 1):
        released += state.push(ord(text[end - 1]))
        if state.stop_hit is not None:
            break
        beginnings = [s[:size] for s in stop for size in range(1, len(s)) if text[:end].endswith(s[:size])]
        assert released == text[: end - max(map(len, beginnings), default=0)]


@given(
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=15),
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), max_size=3),
    st.integers(0, 12),
)
@example(["ab", "a"], ["b", "aba"], 2)
def test_before_min_tokens_a_stop_string_is_ordinary_text(chunks: list[str], stop: list[str], min_tokens: int) -> None:
    text = "".join(chunks)
    expected: tuple[str, str | None] = (text, None)
    start_of_stops = len("".join(chunks[: max(0, min_tokens - 1)]))
    for end in range(start_of_stops + 1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            expected = (text[: end - max(map(len, ending))], max(ending, key=len))
            break
    tokenizer = ChunkTokenizer([chunk.encode() for chunk in chunks])
    pieces, hit = stream(tokenizer, range(len(chunks)), stop, min_tokens=min_tokens)
    assert ("".join(pieces), hit) == expected


def test_a_stop_string_may_be_complete_with_the_token_that_reaches_min_tokens() -> None:
    token_ids = BYTES.encode("a.a.")
    assert stream(BYTES, token_ids, ["."], min_tokens=2) == (["a", ""], ".")
    assert stream(BYTES, token_ids, ["."], min_tokens=3) == (["a", ".", "a", ""], ".")


def test_a_stop_string_that_comes_too_early_is_not_held_back() -> None:
    assert stream(BYTES, BYTES.encode("abc"), ["ab", "longer"], min_tokens=3) == (["", "ab", "c", ""], None)


def test_skipped_tokens_count_for_min_tokens() -> None:
    assert stream(BYTES, BYTES.encode(f"a{BOS}."), ["."], min_tokens=3) == (["a", "", ""], ".")


def test_nothing_comes_after_a_stop_string() -> None:
    text = IncrementalText(BYTES, ["."], skip_special_tokens=True)
    assert [text.push(token_id) for token_id in BYTES.encode("a.b")] == ["a", "", ""]
    assert (text.finish(), text.stop_hit) == ("", ".")


def test_the_end_releases_the_beginning_of_a_stop_string_once() -> None:
    text = IncrementalText(BYTES, ["bcd"], skip_special_tokens=True)
    assert [text.push(token_id) for token_id in BYTES.encode("abc")] == ["a", "", ""]
    assert [text.finish(), text.finish()] == ["bc", ""]
    assert text.stop_hit is None


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """sglang#34852: on a stream of U+FFFD the window grew with the output."""
    for chunk in (b"a", b"\xff", b"\xf0\x9f", b"", b"a\xe4", EMOJI.encode()):
        tokenizer = ChunkTokenizer([chunk])
        stream(tokenizer, [0] * 500, ["stop"])
        assert tokenizer.longest_decode <= 2 * MAX_WINDOW


def test_special_tokens_alone_are_not_kept() -> None:
    class Counting(ByteTokenizer):
        longest_decode = 0

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.longest_decode = max(self.longest_decode, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = Counting()
    assert "".join(stream(tokenizer, tokenizer.encode(EOS) * 500 + tokenizer.encode("a"))[0]) == "a"
    assert tokenizer.longest_decode == 1


def test_as_many_and_as_long_stop_strings_as_allowed() -> None:
    """vllm#51447: many stop strings took a minute. Here the text falls out of a long beginning again and again."""
    stop = ["a" * 1000 + chr(ord("A") + index % 26) * (index // 26 + 1) for index in range(64)]
    token_ids = BYTES.encode(("a" * 1100 + "b") * 2 + stop[5] + "c")
    pieces, hit = stream(BYTES, token_ids, stop)
    assert ("".join(pieces), hit) == (("a" * 1100 + "b") * 2, stop[5])


def test_what_begins_one_stop_string_may_hide_in_the_end_of_another() -> None:
    tokenizer = ChunkTokenizer([b"x<|", b"<|im", b"_end", b"_", b"<|im_end|", b">y"])
    pieces = ["x", "<|", "", "<|im_", "end_", ""]
    assert stream(tokenizer, range(6), ["<|im_end|>", "end__"]) == (pieces, "<|im_end|>")


# Faults of other servers, so that they stay away.


def test_vllm_3574_a_stop_string_over_several_tokens_is_not_streamed() -> None:
    """DEF, G and HI were sent before J completed the stop string DEFGHIJ."""
    tokenizer = ChunkTokenizer([b"DEF", b"G", b"HI", b"J", b"KLM"])
    assert stream(tokenizer, range(5), ["DEFGHIJ"]) == (["", "", "", ""], "DEFGHIJ")


def test_vllm_3574_a_beginning_that_does_not_become_a_stop_string_is_streamed() -> None:
    tokenizer = ChunkTokenizer([b"DEF", b"G", b"HI", b"K"])
    assert stream(tokenizer, range(4), ["DEFGHIJ"]) == (["", "", "", "DEFGHIK", ""], None)


def test_vllm_3672_a_stop_string_need_not_end_with_a_token() -> None:
    """Text was compared with the stop string at its end alone."""
    tokenizer = ChunkTokenizer([b"one", b" two\n\nthree"])
    assert stream(tokenizer, range(2), ["\n\n"]) == (["one", " two"], "\n\n")


def test_tgi_1039_a_stop_string_may_be_a_part_of_a_token() -> None:
    tokenizer = ChunkTokenizer([b" is", b" Paris", b"."])
    assert stream(tokenizer, range(3), ["Pari"]) == ([" is", " "], "Pari")


def test_sglang_31598_a_character_is_not_repeated_when_the_next_one_is_split() -> None:
    """Steps that ended in U+FFFD moved the sent offset back, and 世 was sent twice."""
    tokenizer = ChunkTokenizer([b"A ", "世".encode(), b"a\xc3", b"\xa9", b"b"])
    assert stream(tokenizer, range(5)) == (["A ", "世", "a", "é", "b", ""], None)


def test_ferrox_124_a_character_split_over_tokens_is_whole() -> None:
    """An emoji of two tokens was decoded token by token, to two U+FFFD."""
    tokenizer = ChunkTokenizer([b"today? ", b"\xf0\x9f\x98", b"\x80"])
    assert stream(tokenizer, range(3)) == (["today? ", "", EMOJI, ""], None)


def test_a_character_that_is_never_completed_is_one_replacement_at_the_end() -> None:
    tokenizer = ChunkTokenizer([b"a", b"\xf0\x9f", b"\x98"])
    assert stream(tokenizer, range(3)) == (["a", "", "", "\ufffd"], None)


def test_a_stop_string_may_end_with_the_replacement_of_a_character_that_was_never_completed() -> None:
    tokenizer = ChunkTokenizer([b"xa", b"\xf0"])
    assert stream(tokenizer, range(2), ["a\ufffd"]) == (["x", "", ""], "a\ufffd")


def test_a_replacement_character_that_the_model_wrote_is_kept() -> None:
    tokenizer = ChunkTokenizer(["\ufffd".encode(), b"a"])
    assert stream(tokenizer, range(2)) == (["", "\ufffda", ""], None)
