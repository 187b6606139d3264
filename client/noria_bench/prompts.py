"""Texts of given token counts that begin alike only where they are meant to.

A prompt is made of spans. Equal spans after equal spans are the same tokens; spans of different identities differ from
their first token on, as far as there are words to begin with, and from their second anyway.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from noria_bench.chance import stream, stream_seed
from noria_bench.errors import BenchError
from noria_bench.workload import COMMON_WORDS, word_tokens

SHIPPED_TEXT = "founding_documents.txt"
TOKENIZER_FILE = "tokenizer.json"
MIN_WORDS = 100

# what a span is encoded behind, where it is not the first: how it is cut must not depend on the spans before it
_CONTEXT = "The"
# a word of the text breaks into fewer tokens than this
_MAX_BACK_OFF = 64
_CHARACTERS_PER_TOKEN = 4
# one of them is a token by itself in any vocabulary that knows English, or bytes
_FILLERS = ("the", "and", "of", "a")


class TextTokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone, without special tokens around it."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens that it would put around a text."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def load_tokenizer(path: Path) -> TextTokenizer:
    """path: a Hugging Face tokenizer.json, or its folder. Raises BenchError."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BenchError("prompts of exact lengths need `pip install tokenizers`") from None
    try:
        return HuggingFaceTokenizer(Tokenizer.from_file(str(file)))
    except Exception as error:  # the compiled tokenizer raises bare Exceptions
        raise BenchError(f"cannot read the tokenizer {file}: {error}") from None


def read_text(path: Path | None = None) -> str:
    """What prompts are cut from: a file's text, or the one shipped with the package. Raises BenchError."""
    if path is None:
        return resources.files("noria_bench").joinpath("texts", SHIPPED_TEXT).read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"text: cannot read {path}: {error}") from None
    if len(text.split()) < MIN_WORDS:
        raise BenchError(f"text: {path} must hold at least {MIN_WORDS} words")
    return text


@dataclass(frozen=True, slots=True)
class Span:
    """num_tokens of the text that goes by a number, which may be negative.

    A longer one of the same identity begins like a shorter one, but for the shorter one's last word.
    """

    identity: int
    num_tokens: int


class PromptWriter(Protocol):
    def write(self, spans: Sequence[Span]) -> str:
        """The prompt of these spans, which are at least one."""


class WordPrompts:
    """Without a tokenizer: sentences of common words, each of which is one token in the usual vocabularies."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._leads = _shuffled(COMMON_WORDS, seed)

    def write(self, spans: Sequence[Span]) -> str:
        return "".join(chain.from_iterable(map(self._tokens, spans))).removeprefix(" ")

    def _tokens(self, span: Span) -> Iterator[str]:
        rng = random.Random(stream_seed(self._seed, "text", span.identity))
        leads = (f" {word}" for word in lead_words(self._leads, span.identity, 3))
        return islice(chain(leads, word_tokens(rng)), span.num_tokens)


class TokenPrompts:
    """Cut from a text to exact numbers of the tokenizer's tokens: encoding a prompt gives as many as were asked for."""

    def __init__(self, tokenizer: TextTokenizer, text: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = text.split()
        self._tokens_per_word = len(tokenizer.encode(" ".join(self._words))) / len(self._words)
        self._num_context = len(tokenizer.encode(_CONTEXT))
        words, self._fillers = self._opening_words()
        self._leads = _shuffled(words, seed)
        self._cache: dict[tuple[Span, bool], tuple[str, np.ndarray[Any, Any]]] = {}

    def write(self, spans: Sequence[Span]) -> str:
        """Raises BenchError where the tokenizer merges what spaces part, so that no text has so many tokens."""
        if len(spans) == 1:
            return self._cut(spans[0], is_first=True, has_next=False)[0]
        parts = [self._cached(span, is_first=not place) for place, span in enumerate(spans)]
        prompt = "".join(text for text, _ in parts)
        if self._tokenizer.encode(prompt) != np.concatenate([ids for _, ids in parts]).tolist():
            raise BenchError("this tokenizer does not keep apart what spaces part: shared prefixes cannot be exact")
        return prompt

    def _cached(self, span: Span, is_first: bool) -> tuple[str, np.ndarray[Any, Any]]:
        key = (span, is_first)
        if key not in self._cache:
            text, ids = self._cut(span, is_first, has_next=True)
            self._cache[key] = (text, np.asarray(ids, dtype=np.int32))
        return self._cache[key]

    def _cut(self, span: Span, is_first: bool, has_next: bool) -> tuple[str, list[int]]:
        """The span's text, with the space before it where it is not the first, and its token ids."""
        num_context = 0 if is_first else self._num_context
        num_tokens = num_context + span.num_tokens
        ids = self._long_enough(span, num_tokens, "" if is_first else f"{_CONTEXT} ")
        # a cut within a word may be encoded differently; then it is made before the word, and short words fill up
        for num_kept in range(num_tokens, max(num_context, num_tokens - _MAX_BACK_OFF) - 1, -1):
            kept = self._tokenizer.decode(ids[:num_kept])
            for filler in self._fillers if num_kept < num_tokens else ("",):
                text = kept + f" {filler}" * (num_tokens - num_kept)
                encoded = self._tokenizer.encode(text)
                if len(encoded) != num_tokens or encoded[:num_kept] != ids[:num_kept]:
                    continue
                if not has_next or self._tokenizer.encode(f"{text} {_CONTEXT}")[:num_tokens] == encoded:
                    return text if is_first else text.removeprefix(_CONTEXT), encoded[num_context:]
        raise BenchError(f"this tokenizer makes no text of {span.num_tokens} tokens")

    def _long_enough(self, span: Span, num_tokens: int, context: str) -> list[int]:
        """Token ids of at least num_tokens of the span's words behind the context."""
        start = int(stream(self._seed, "text", span.identity).integers(len(self._words)))
        leads = lead_words(self._leads, span.identity, 2)
        num_words = math.ceil(1.1 * num_tokens / self._tokens_per_word) + 8
        while True:
            words = (self._words[place % len(self._words)] for place in range(start, start + num_words))
            ids = self._tokenizer.encode(context + " ".join((*leads, *words)))
            if len(ids) >= num_tokens:
                return ids
            num_words *= 2

    def _opening_words(self) -> tuple[list[str], list[str]]:
        """Words of which no two begin with the same token at a text's start; and short ones of one token within it."""
        plain = {word.strip(".,;:?!\"-'()").lower() for word in self._words}
        words = sorted(word for word in plain | {word.capitalize() for word in plain} if word.isalpha())
        encoded = [(word, self._tokenizer.encode(word), self._inner(word)) for word in words]
        singles = [one for one in encoded if len(one[1]) == len(one[2]) == 1]
        opening: list[str] = []
        seen: set[int] = set()
        # one token at a start and one within: then no two words have either in common
        for word, first, _ in singles if len(singles) >= MIN_WORDS else encoded:
            if first and first[0] not in seen:
                opening.append(word)
                seen.add(first[0])
        if not opening:
            raise BenchError("text: none of its words can begin a prompt; it must hold words between spaces")
        return opening, [word for word in _FILLERS if len(self._inner(word)) == 1]

    def _inner(self, word: str) -> list[int]:
        return self._tokenizer.encode(f"{_CONTEXT} {word}")[self._num_context :]


def count_tokens(text: str, tokenizer: TextTokenizer | None) -> int:
    """Without a tokenizer an estimate: four characters a token."""
    return math.ceil(len(text) / _CHARACTERS_PER_TOKEN) if tokenizer is None else len(tokenizer.encode(text))


def cut_text(text: str, num_tokens: int, tokenizer: TextTokenizer | None) -> str:
    """The text's beginning, of at most num_tokens, or about so many without a tokenizer."""
    if tokenizer is None:
        return text[: num_tokens * _CHARACTERS_PER_TOKEN]
    ids = tokenizer.encode(text)
    for num_kept in range(min(num_tokens, len(ids)), 0, -1):
        # a cut within a character or a word may be encoded as more
        cut = tokenizer.decode(ids[:num_kept])
        if len(tokenizer.encode(cut)) <= num_tokens:
            return cut
    return text[:1]


def _shuffled(words: Sequence[str], seed: int) -> list[str]:
    return [words[place] for place in stream(seed, "leads").permutation(len(words))]


def lead_words(words: Sequence[str], identity: int, num: int) -> list[str]:
    """`num` words that no other of len(words)**num consecutive identities has; of len(words) not even the first."""
    leads = []
    previous = 0
    for _ in range(num):
        identity, digit = divmod(identity, len(words))
        # counted from the word before, small identities have neither the same second word nor the same word twice
        previous = (previous + digit + 1) % len(words)
        leads.append(words[previous])
    return leads
