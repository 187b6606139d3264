"""Writes the tokenizer inside a GGUF file as the tokenizer files of a Hugging Face directory.

The work is transformers'. Added here: what llama.cpp's name for the pre-tokenizer says and transformers passes over.
"""

from __future__ import annotations

from pathlib import Path

from noria.errors import ConfigError

# llama.cpp's pre-tokenizers that cut text as GPT-2's does once each digit stands alone (llama-vocab.cpp)
_SINGLE_DIGIT_PRE_TOKENIZERS = ("smollm", "starcoder", "refact", "command-r", "codeshell")


def save_gguf_tokenizer(gguf_path: Path, directory: Path, pre_tokenizer: str | None) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template of a GGUF file to `directory`.

    pre_tokenizer: the file's tokenizer.ggml.pre.
    Raises ConfigError if the file holds no tokenizer that transformers can read.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, trust_remote_code=False)
    except Exception as error:  # a library's errors on a file's content are of any type
        raise ConfigError(f"{gguf_path}: its tokenizer cannot be read ({error})") from error
    if pre_tokenizer in _SINGLE_DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(directory)
