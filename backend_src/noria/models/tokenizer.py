"""Tokenizer: text to token ids and back, with the model's own tokenizer.json and chat template.

Reads the files through transformers, then uses the compiled tokenizer beneath it, which one thread may encode with
while another decodes; transformers' own calls set truncation and padding on shared state each time.
Never runs code that comes with a model. Streaming (a character that is cut between tokens) is `engine.text`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noria.errors import ConfigError, InvalidRequest

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Made by `load_tokenizer`.

    vocab_size: ids that a text can encode to; a model's own vocabulary may be padded beyond it.
    special_token_ids: what `decode` leaves out with skip_special_tokens.
    eos_token_ids: the tokenizer's; a model's config may name more.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        eos_token_id: int | None = tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos_token_id is None else (eos_token_id,)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one (a first bos, say)."""
        return self._backend.encode(text, add_special_tokens=True).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next answer begins.

        messages: each with a role and a content. The template writes all special tokens, so that none comes twice.
        Raises InvalidRequest if there is no template or it does not take these messages.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("apply_chat_template must be false: this model has no chat template")
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            # templates raise by themselves, when roles do not alternate for instance
            raise InvalidRequest(
                f"text_input: the model's chat template does not take these messages: {error}"
            ) from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Ids beyond vocab_size have no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises ConfigError if it is missing or damaged."""
    if not (directory / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{directory} holds no {TOKENIZER_FILE}; transformers writes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    # not AutoTokenizer: it imports the model classes too, three seconds more
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the compiled tokenizer raises bare Exceptions
        raise ConfigError(f"cannot read the tokenizer of {directory}: {error}") from error
    return Tokenizer(tokenizer)
