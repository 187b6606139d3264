"""How large everything is: on an H200, in a quick look, and in the interpreter, where only that it runs matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from noria.models.model_config import ModelConfig
from noria.models.rope_scaling import Llama3RopeScaling


@dataclass(frozen=True)
class AttentionHeads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Sizes:
    """copy_bytes: of the copy that bandwidth is measured by. matrix: rows of the square matrices that are multiplied.

    decode_points: (batch, context). quantised_points: of them, in int8 and fp8 too. prefill_points: (chunk, position).
    step_batches: rows of a decode step, whose context is step_context. step_repeats: timed steps.
    slots: each with the numbers of requests for in-flight, static and dynamic: of closed batches, which are all alike,
        a few will do, where in-flight needs many, so that its end, with empty slots, does not count for much.
    peer_requests: of those at the first number of slots, which Transformers gets too. output_scale: of the seed mix.
    invariance_tokens: of the sequence whose logits are compared.
    """

    heads: tuple[AttentionHeads, ...]
    models: dict[str, ModelConfig]
    copy_bytes: int
    matrix: int
    decode_points: tuple[tuple[int, int], ...]
    quantised_points: tuple[tuple[int, int], ...]
    prefill_points: tuple[tuple[int, int], ...]
    step_batches: tuple[int, ...]
    step_context: int
    step_repeats: int
    slots: tuple[tuple[int, int, int, int], ...]
    peer_requests: int
    output_scale: float
    max_num_batched_tokens: int
    invariance_tokens: int


def _llama(**values: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "has_qk_norm": False,
        "max_position_embeddings": 131072,
    }
    return ModelConfig(**(settings | values))


def _rope(factor: float) -> Llama3RopeScaling:
    return Llama3RopeScaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


LLAMA_1B = _llama(
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    rope_scaling=_rope(32.0),
)
LLAMA_8B = _llama(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    rope_scaling=_rope(8.0),
)
# for exactness: two key-value heads of three query heads each, head_dim unlike hidden_size / num_heads
TINY = _llama(
    vocab_size=304,
    hidden_size=96,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)

H200 = Sizes(
    heads=(AttentionHeads("8B", 32, 8, 128), AttentionHeads("1B", 32, 8, 64)),
    models={"8B": LLAMA_8B, "1B": LLAMA_1B},
    copy_bytes=2**32,
    matrix=8192,
    decode_points=tuple((batch, context) for context in (8192, 2048, 512, 32768) for batch in (64, 1, 8, 256)),
    quantised_points=((64, 8192), (8, 8192)),
    prefill_points=tuple((chunk, position) for chunk in (2048, 8192, 512) for position in (0, 8192)),
    step_batches=(1, 64),
    step_context=128,
    step_repeats=40,
    slots=((64, 1024, 512, 128), (256, 4096, 1024, 256)),
    peer_requests=256,
    output_scale=1.0,
    max_num_batched_tokens=2048,
    invariance_tokens=300,
)
QUICK = replace(
    H200,
    decode_points=((64, 8192), (1, 8192), (1, 512)),
    quantised_points=((64, 8192),),
    prefill_points=((2048, 0), (2048, 8192)),
    slots=((64, 1024, 256, 64),),
    peer_requests=128,
)
TOY = Sizes(
    heads=(AttentionHeads("toy", 6, 2, 64),),
    models={"1B": replace(TINY, num_layers=1)},
    copy_bytes=2**16,
    matrix=64,
    decode_points=((2, 20),),
    quantised_points=((2, 20),),
    prefill_points=((20, 4),),
    step_batches=(2,),
    step_context=5,
    step_repeats=1,
    slots=((2, 4, 4, 2),),
    peer_requests=2,
    output_scale=0.008,
    max_num_batched_tokens=32,
    invariance_tokens=9,
)
