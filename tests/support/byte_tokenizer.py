"""A tokenizer without a vocabulary file: one token per UTF-8 byte, and a few special tokens behind them."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUM_BYTES = 256
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, IM_START, IM_END)


class ByteTokenizer:
    """Stands in for `noria.models.tokenizer.Tokenizer`: ids 0 to 255 are bytes, 256 onwards SPECIAL_TOKENS."""

    def __init__(self) -> None:
        self._special = {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
        self._pattern = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
        self.vocab_size = NUM_BYTES + len(SPECIAL_TOKENS)
        self.special_token_ids = frozenset(self._special.values())
        self.eos_token_ids = (self._special[EOS],)

    def encode(self, text: str) -> list[int]:
        """One id per byte, but one for each special token that is written out in the text; none is added."""
        ids: list[int] = []
        for part in self._pattern.split(text):
            ids.extend([self._special[part]] if part in self._special else part.encode())
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        data = bytearray()
        for token_id in token_ids:
            if token_id < NUM_BYTES:
                data.append(token_id)
            elif not skip_special_tokens:
                data += SPECIAL_TOKENS[token_id - NUM_BYTES].encode()
        return data.decode(errors="replace")
