"""The names and shapes of a model's weights, in Hugging Face's naming, and the check that a file holds exactly these.

Knows nothing of files or tensors: shapes are tuples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from noria.errors import ConfigError
from noria.models.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]

_MAX_NAMES_IN_ERROR = 8
# buffers that old checkpoints carry; they follow from the config
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of each weight, a linear layer's being (outputs, inputs). No head if it is the embedding."""
    weights: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_weights(config).items():
            weights[f"model.layers.{layer}.{name}"] = shape
    weights[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        weights[HEAD] = (config.vocab_size, config.hidden_size)
    return weights


def _layer_weights(config: ModelConfig) -> dict[str, Shape]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": ((queries, hidden), config.attention_bias),
        "self_attn.k_proj": ((keys, hidden), config.attention_bias),
        "self_attn.v_proj": ((keys, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, queries), config.attention_output_bias),
        "mlp.gate_proj": ((mlp, hidden), config.mlp_bias),
        "mlp.up_proj": ((mlp, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, mlp), config.mlp_bias),
    }
    weights: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (shape, has_bias) in linears.items():
        weights[f"{name}.weight"] = shape
        if has_bias:
            weights[f"{name}.bias"] = shape[:1]
    if config.has_qk_norm:
        weights["self_attn.q_norm.weight"] = weights["self_attn.k_norm.weight"] = (config.head_dim,)
    return weights


def check_weights(found: Mapping[str, Shape], config: ModelConfig, source: str = "the model") -> None:
    """Raises ConfigError, naming `source` and the weights, unless `found` is what `expected_weights` says.

    Two things may be there besides: rotary_emb.inv_freq, and lm_head.weight where the head is the embedding (that it
    holds the same numbers is for the loader to check).
    """
    expected = expected_weights(config)
    missing = [name for name in expected if name not in found]
    left_over = [name for name in found if name not in expected and not is_redundant(name, config)]
    misshapen = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems = [
        f"{title}: {_join(names)}"
        for title, names in (("missing", missing), ("left over", left_over), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ConfigError(f"the weights of {source} do not fit its config. {'; '.join(problems)}")


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a weight of that name may be in a file although `expected_weights` does not ask for it."""
    return bool(_DERIVED.fullmatch(name)) or (name == HEAD and config.tie_word_embeddings)


def _join(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MAX_NAMES_IN_ERROR
    return ", ".join(listed[:_MAX_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
