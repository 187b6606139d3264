"""Reads a GGUF file of llama.cpp as the config and the weights of a Hugging Face model.

Strict as the other loader: every name, shape and type is checked before the first tensor is read, and nothing that
would change the logits is skipped. The tokenizer in the file is the business of `gguf_tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ConfigError
from noria.models.json_fields import JsonFields, errors_naming
from noria.models.model_config import ModelConfig
from noria.models.rope_scaling import LinearRopeScaling, RopeFactors, RopeScaling
from noria.models.weights import EMBEDDING, FINAL_NORM, HEAD, Shape, check_weights

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

Array = npt.NDArray[np.float32]


class GgufModel:
    """The model in a GGUF file, checked; its tensors are still to be read.

    pre_tokenizer: llama.cpp's name for how the tokenizer cuts a text before it looks for tokens.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any], pre_tokenizer: str | None) -> None:
        self.config = config
        self.pre_tokenizer = pre_tokenizer
        self._tensors = tensors

    @property
    def num_weights(self) -> int:
        return len(self._tensors)

    def weights(self) -> Iterator[tuple[str, Array]]:
        """Hugging Face names and float32 arrays, each dequantised only when it is asked for."""
        is_permuted = self.config.family == "llama"
        for name, tensor in self._tensors.items():
            array = _dequantize(tensor)
            if is_permuted and ".attn_q." in name:
                array = _unpermute(array, self.config.num_heads)
            elif is_permuted and ".attn_k." in name:
                array = _unpermute(array, self.config.num_kv_heads)
            yield _hf_name(name), array


def read_gguf(path: Path) -> GgufModel:
    """Raises ConfigError, naming the file, if it is missing, truncated, corrupt or no GGUF, or holds an architecture,
    a rope scaling, a tensor or a tensor type that is not supported.
    """
    metadata, tensors = _open(path)
    for tensor in tensors.values():
        if tensor.tensor_type.name not in TENSOR_TYPES:
            raise ConfigError(
                f"{path}: the type of {tensor.name} must be one of {', '.join(TENSOR_TYPES)}, "
                f"not {tensor.tensor_type.name}"
            )
    factors = tensors.pop(_ROPE_FACTORS, None)
    shapes = {_hf_name(name): tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    with errors_naming(str(path)):
        config = _config(path, metadata, shapes, None if factors is None else _dequantize(factors))
    check_weights(shapes, config, str(path))
    return GgufModel(config, tensors, metadata.get("tokenizer.ggml.pre"))


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, tensors by name); lists of the metadata, which are the tokenizer's, are left out."""
    from gguf import GGUFReader, GGUFValueType

    if not path.is_file():
        raise ConfigError(f"{path} is missing")
    try:
        reader = GGUFReader(path)
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if field.types and field.types[0] is not GGUFValueType.ARRAY
        }
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        # numpy's complaint when a length in the file points outside of it
        raise ConfigError(f"cannot read {path}: not a whole GGUF file ({error})") from None
    if reader.byte_order == "S":
        raise ConfigError(f"{path} was written for a machine of the other byte order; convert it")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; one that has none stays as it is, and is left over in `check_weights`."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _config(path: Path, metadata: dict[str, Any], shapes: Mapping[str, Shape], factors: Array | None) -> ModelConfig:
    fields = JsonFields(str(path), metadata)
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise fields.error("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    if fields.integer(f"{family}.expert_count", 0, minimum=0):
        raise fields.error(f"{family}.expert_count", "0: mixtures of experts are not supported")
    hidden_size = fields.integer(f"{family}.embedding_length")
    num_heads = fields.integer(f"{family}.attention.head_count")
    head_dim = fields.integer(f"{family}.attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(f"{family}.{name}", head_dim) != head_dim:
            raise fields.error(f"{family}.{name}", f"the head size ({head_dim})")
    if EMBEDDING not in shapes:
        raise ConfigError(f"{path} holds no tensor token_embd.weight")
    # llama.cpp ends a text at any of these: end of the sequence, of the turn, of the message
    end_ids = [fields.integer(f"tokenizer.ggml.{name}_token_id", None, minimum=0) for name in ("eos", "eot", "eom")]
    return ModelConfig(
        family=family,
        vocab_size=shapes[EMBEDDING][0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{family}.feed_forward_length"),
        num_layers=fields.integer(f"{family}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{family}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{family}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields, family, factors),
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        attention_output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in shapes,
        has_qk_norm=family == "qwen3",
        tie_word_embeddings=HEAD not in shapes,
        max_position_embeddings=fields.integer(f"{family}.context_length"),
        bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in end_ids if token_id is not None)),
    )


def _rope_scaling(fields: JsonFields, family: str, factors: Array | None) -> RopeScaling | None:
    kind = fields.get(f"{family}.rope.scaling.type")
    if factors is not None:
        # written where Llama 3's scaling is; in it `kind` says nothing
        return RopeFactors(tuple(float(factor) for factor in factors))
    match kind:
        case None | "none":
            return None
        case "linear":
            return LinearRopeScaling(fields.number(f"{family}.rope.scaling.factor"))
    raise fields.error(f"{family}.rope.scaling.type", "none or linear")


def _dequantize(tensor: Any) -> Array:
    from gguf.quants import dequantize

    return dequantize(tensor.data, tensor.tensor_type)


def _unpermute(array: Array, num_heads: int) -> Array:
    """Rows of each head from llama.cpp's order back to Hugging Face's.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3)...; Hugging Face rotates row i with row i + head_dim / 2. Its
    converter therefore interleaves the halves of each head (`LlamaModel.permute` in convert_hf_to_gguf.py).
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
