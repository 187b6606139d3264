"""Writes a transformers model as a GGUF file, the way llama.cpp's converter does, for any of its tensor types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def gguf_name(hf_name: str) -> str:
    for ours, theirs in _NAMES.items():
        hf_name = hf_name.replace(ours, theirs)
    return hf_name


def model_tensors(model: Any) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names, rows of q and k permuted where the architecture is llama."""
    config = model.config
    tensors = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if config.model_type == "llama" and "q_proj" in hf_name:
            array = _permute(array, config.num_attention_heads)
        elif config.model_type == "llama" and "k_proj" in hf_name:
            array = _permute(array, config.num_key_value_heads)
        tensors[gguf_name(hf_name)] = array
    return tensors


def model_metadata(model: Any) -> dict[str, Any]:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    arch = config.model_type
    return {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def quantized(array: np.ndarray, tensor_type: str, seed: int = 0) -> np.ndarray:
    """`array` in that type. For Q4_K and Q6_K, which gguf only reads, blocks of random bytes with small scales."""
    qtype = GGMLQuantizationType[tensor_type]
    if tensor_type not in ("Q4_K", "Q6_K"):
        return quantize(array, qtype)
    block_elements, block_bytes = GGML_QUANT_SIZES[qtype]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (array.size // block_elements, block_bytes), dtype=np.uint8)
    # the half-precision scales: two at the front of a Q4_K block, one at the end of a Q6_K block
    scales = slice(0, 4) if tensor_type == "Q4_K" else slice(block_bytes - 2, block_bytes)
    num_scales = (scales.stop - scales.start) // 2
    blocks[:, scales] = random.uniform(1e-4, 1e-3, (len(blocks), num_scales)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: Any,
    tensor_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> dict[str, np.ndarray]:
    """Writes the model with its matrices in `tensor_type` and the tiny tokenizer; returns the tensors as stored.

    metadata, tensors: added or put in place of the model's own; None leaves one out.
    """
    fields = model_metadata(model) | dict(metadata or {})
    arrays = model_tensors(model) | dict(tensors or {})
    writer = GGUFWriter(path, fields.pop("general.architecture"))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        if value is not None:
            add[type(value)](key, value)
    vocabulary = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    stored = {}
    for name, array in arrays.items():
        if array is None:
            continue
        kept_type = tensor_type if array.ndim == 2 else "F32"
        stored[name] = quantized(array, kept_type)
        writer.add_tensor(name, stored[name], raw_dtype=GGMLQuantizationType[kept_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves the two halves of the rows of each head: `LlamaModel.permute` in llama.cpp's converter."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
