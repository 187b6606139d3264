"""ModelConfig: the numbers that make one model of the Llama family; read from and written to a config.json.

Strict: what would change the logits and is not supported is an error that names the field, never ignored.
Knows nothing of tensors; the names and shapes of the weights that follow from it are in `weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.errors import ConfigError
from noria.models.json_fields import JsonFields, errors_naming
from noria.models.rope_scaling import RopeScaling, inverse_frequencies, parse_rope, rope_to_hf

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(_ARCHITECTURES)
# what transformers takes when config.json leaves the field out
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_MISTRAL_WINDOW = 4096
_DEFAULT_QWEN_LAYERS_WITHOUT_WINDOW = 28


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model: embedding, num_layers of attention and SwiGLU with RMS norms before each, norm, head.

    family: llama, mistral, qwen2 or qwen3; the fields below already say all that differs between them.
    head_dim: of each of the num_heads query and num_kv_heads key and value heads; not always hidden_size / num_heads.
    attention_bias: of the q, k and v projections; attention_output_bias: of the o projection.
    mlp_bias: of the gate, up and down projections.
    has_qk_norm: an RMS norm over each head of q and k before they are rotated.
    sliding_window: tokens that a token attends to, itself included, in every layer; None is all before it.
    eos_token_ids: tokens that end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the number of attention heads ({self.num_heads}) must be a multiple of the number of key and value "
                f"heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {self.head_dim}: rotary embedding turns pairs")
        for name, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token_id in ids:
                if token_id is not None and not 0 <= token_id < self.vocab_size:
                    raise ConfigError(f"{name} must be below vocab_size ({self.vocab_size}), not {token_id}")

    def inv_freq(self) -> list[float]:
        """Radians per position of each rotated pair, [head_dim / 2]; see `rope_scaling.inverse_frequencies`."""
        return inverse_frequencies(self.rope_theta, self.head_dim, self.rope_scaling)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, source: str = CONFIG_FILE
    ) -> ModelConfig:
        """From the content of config.json and generation_config.json, as transformers 4 or 5 wrote them.

        Raises ConfigError, naming `source`, the field and what is valid.
        """
        fields = JsonFields(source, config)
        family = _parse_family(fields)
        _refuse_unsupported(fields)
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        head_dim = fields.integer(
            "head_dim", _DEFAULT_QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_heads
        )
        max_position_embeddings = fields.integer("max_position_embeddings")
        rope_theta, rope_scaling = parse_rope(fields, head_dim, max_position_embeddings)
        has_stated_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
        generation = JsonFields(GENERATION_CONFIG_FILE, generation_config or {})
        with errors_naming(source):
            return cls(
                family=family,
                vocab_size=fields.integer("vocab_size"),
                hidden_size=hidden_size,
                intermediate_size=fields.integer("intermediate_size"),
                num_layers=fields.integer("num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=fields.integer("num_key_value_heads", num_heads),
                head_dim=head_dim,
                rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                attention_bias=has_stated_bias or family == "qwen2",
                attention_output_bias=has_stated_bias,
                mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
                has_qk_norm=family == "qwen3",
                tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
                max_position_embeddings=max_position_embeddings,
                sliding_window=_parse_sliding_window(fields, family, max_position_embeddings),
                bos_token_id=next(iter(generation.token_ids("bos_token_id") or fields.token_ids("bos_token_id")), None),
                # as generate() does: those of generation_config.json in place of config.json's, not besides them
                eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
            )

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The content of a config.json that states this, for `from_hf` and for transformers.

        dtype: of the weights beside it, as config.json names it (float32, bfloat16, float16).
        """
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope_to_hf(self.rope_theta, self.rope_scaling, self.max_position_embeddings),
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "dtype": dtype,
        }


def load_model_config(directory: Path) -> ModelConfig:
    """The config of a Hugging Face directory. Raises ConfigError, naming the file, the field and what is valid."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} holds no {CONFIG_FILE}: a model is a Hugging Face directory or a .gguf file")
    generation_path = directory / GENERATION_CONFIG_FILE
    generation_config = JsonFields.read(generation_path).values if generation_path.is_file() else None
    return ModelConfig.from_hf(JsonFields.read(path).values, generation_config, source=str(path))


def _parse_family(fields: JsonFields) -> str:
    architectures = fields.get("architectures")
    if not architectures:
        family = fields.get("model_type")
        if family not in FAMILIES:
            raise fields.error("model_type", f"one of {', '.join(FAMILIES)}")
        return family
    for family, architecture in _ARCHITECTURES.items():
        if architectures == [architecture]:
            return family
    raise fields.error("architectures", f"one of {', '.join(_ARCHITECTURES.values())}")


def _refuse_unsupported(fields: JsonFields) -> None:
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "silu")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "absent: quantised weights are read from .gguf files only")


def _parse_sliding_window(fields: JsonFields, family: str, max_position_embeddings: int) -> int | None:
    """The window, None where no position up to the model's last is outside of it."""
    if family == "llama":
        return None
    if family == "mistral":
        # absent and null differ here: null is how later models of the family say that they have no window
        has_window = fields.get("sliding_window") is not None or "sliding_window" not in fields.values
        window = fields.integer("sliding_window", _DEFAULT_MISTRAL_WINDOW)
    else:
        has_window = fields.boolean("use_sliding_window", False) and fields.get("sliding_window") is not None
        window = fields.integer("sliding_window", max_position_embeddings)
    if not has_window or window >= max_position_embeddings:
        return None
    return window if _is_in_all_layers(fields, family) else None


def _is_in_all_layers(fields: JsonFields, family: str) -> bool:
    """Whether all layers have the window or none has; raises ConfigError for a mix of them."""
    num_layers = fields.integer("num_hidden_layers")
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if len(set(layer_types)) > 1:
            raise fields.error("layer_types", "the same for all layers: a window in some of them is not supported")
        return "sliding_attention" in layer_types
    if family == "mistral":
        return True
    num_layers_without = fields.integer("max_window_layers", _DEFAULT_QWEN_LAYERS_WITHOUT_WINDOW, minimum=0)
    if 0 < num_layers_without < num_layers:
        raise fields.error("max_window_layers", f"0 or at least num_hidden_layers ({num_layers})")
    return num_layers_without == 0
