"""From the text of a request to the token ids of its prompt. Knows no Triton."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from noria.errors import InvalidRequest

# Text with more bytes than this a token cannot fit into the limit, and is refused before the tokenizer works on it.
MAX_BYTES_PER_TOKEN = 256
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")


class PromptTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


class PromptEncoder:
    """Encodes plain prompts and chats of at most `max_prompt_len` tokens."""

    def __init__(self, tokenizer: PromptTokenizer, max_prompt_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_prompt_len * MAX_BYTES_PER_TOKEN

    def encode(self, text: str, is_chat: bool) -> list[int]:
        """is_chat: `text` is one user message, or a JSON list of messages. Raises InvalidRequest."""
        if not text:
            raise InvalidRequest("text_input must not be empty")
        num_bytes = len(text.encode("utf-8", errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            raise InvalidRequest(f"text_input must have at most {self._max_bytes} bytes, not {num_bytes}")
        return self._tokenizer.encode_chat(parse_messages(text)) if is_chat else self._tokenizer.encode(text)


def parse_messages(text: str) -> list[dict[str, str]]:
    """Text that begins as a list of objects is a JSON list of {role, content}; any other is one message of the user.

    Raises InvalidRequest for a list that is malformed or holds something else.
    """
    if _LIST_OF_OBJECTS.match(text) is None:
        return [{"role": "user", "content": text}]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"text_input begins as a list of messages, but is not valid JSON: {error}") from None
    return [_message(value) for value in values]


def _message(value: Any) -> dict[str, str]:
    is_message = isinstance(value, dict) and set(value) == {"role", "content"}
    if not is_message or not all(isinstance(item, str) for item in value.values()):
        raise InvalidRequest("each message in text_input must have the strings role and content, and nothing else")
    for name, item in value.items():
        try:
            item.encode()
        except UnicodeEncodeError as error:
            # a lone surrogate, which JSON can spell and UTF-8 cannot
            raise InvalidRequest(f"a message's {name} in text_input is not valid Unicode: {error.reason}") from None
    return value
