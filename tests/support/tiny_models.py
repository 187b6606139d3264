"""Tiny random models in Hugging Face's format, written by transformers' own classes, with a tokenizer beside them.

Every parameter is random, norms and biases too, so that a forgotten or swapped one shows in the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB_SIZE = 304
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, IM_START, IM_END)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# by family: transformers' prefix of the class names, and what differs from the shared settings
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model of that family; overrides are fields of it."""
    prefix, differences = _FAMILIES[family]
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        # wide enough that the likeliest next tokens are well apart
        "initializer_range": 0.2,
    }
    return getattr(transformers, f"{prefix}Config")(**(settings | differences | overrides))


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model of that family with random float32 weights; the same for the same arguments."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_FAMILIES[family][0]}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0))
    return model.float().eval()


def tiny_model_dir(
    path: Path, family: str, *, tied: bool = True, sharded: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a tiny model (config.json, safetensors, generation_config.json) and its tokenizer to `path`; returns it.

    sharded: several safetensors and an index in place of the one file.
    """
    model = tiny_model(family, seed, tie_word_embeddings=tied, **overrides)
    model.save_pretrained(path, max_shard_size="50KB" if sharded else "1GB")
    save_tiny_tokenizer(path)
    return path


def tiny_tokenizer(add_bos: bool = True) -> Any:
    """A byte-level BPE with a few merges, VOCAB_SIZE tokens and four special ones; ids 0 and 1 begin and end a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "thaeinro" for b in "heanrs"][: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
    )


def save_tiny_tokenizer(path: Path, add_bos: bool = True) -> None:
    tiny_tokenizer(add_bos).save_pretrained(path)
