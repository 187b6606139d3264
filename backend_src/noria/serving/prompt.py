"""From the text of a request to the token ids of its prompt. Knows no Triton."""

from __future__ import annotations

import json
from typing import Any, Protocol

from noria.errors import InvalidRequest

# Text with more bytes than this a token cannot fit into the limit, and is refused before the tokenizer works on it.
MAX_BYTES_PER_TOKEN = 256


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
    """A JSON list of {role, content} as messages; any other text as one message of the user."""
    if not text.lstrip().startswith("["):
        return [{"role": "user", "content": text}]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [{"role": "user", "content": text}]
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        return [{"role": "user", "content": text}]
    return [_message(value) for value in values]


def _message(value: dict[str, Any]) -> dict[str, str]:
    if set(value) != {"role", "content"} or not all(isinstance(item, str) for item in value.values()):
        raise InvalidRequest("each message in text_input must have the strings role and content, and nothing else")
    return value
