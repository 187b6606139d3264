"""Decoder: the forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3), which ModelConfig's fields tell apart.

    x = embedding[token]
    each layer:  x += W_o attention(rope(norm?(W_qkv norm(x)))),   x += W_down swiglu(W_gate_up norm(x))
    logits = W_head norm(x),   only for the tokens whose successor is drawn

Knows nothing of sequences, batching or sampling: tokens come with their positions, slots and block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noria.kernels.linear import Linear
from noria.kernels.ops import KernelSet
from noria.kernels.paged_attention import AttentionPlan, AttentionRow
from noria.kernels.rope_kv_write import Rotation
from noria.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderInput:
    """What one forward pass reads; tensors are int64.

    token_ids, positions, slot_mapping [tokens]; see `rope_kv_write` for slots.
    rows: whose queries the tokens are; they cover them in order.
    logit_indices [rows that are sampled]: tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    rows: Sequence[AttentionRow]
    logit_indices: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """qk_norm: [num_heads + num_kv_heads, head_dim], each head's weight; None where the family has none."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class _WeightPacker:
    """Takes weights by their Hugging Face names out of a dict, and packs them so that never two copies of all exist."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kernels: KernelSet) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels

    def keep(self, name: str) -> Tensor:
        """A weight that no kernel packs; copied, since what the loader gave may be a view of a file."""
        return self._weights.pop(name).clone()

    def linear(self, *names: str, has_bias: bool = False) -> Linear:
        """One layer that computes the outputs of all named ones, one after the other."""
        weight = torch.cat([self._weights.pop(f"{name}.weight") for name in names])
        bias = torch.cat([self._weights.pop(f"{name}.bias") for name in names]) if has_bias else None
        return self._kernels.pack_linear(weight, bias)

    def head(self, embedding: Tensor) -> Linear:
        if self._config.tie_word_embeddings:
            return self._kernels.pack_linear(embedding, None)
        return self.linear("lm_head")

    def layer(self, index: int) -> _Layer:
        config = self._config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            attention_norm=self.keep(f"{prefix}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{part}_proj" for part in "qkv"), has_bias=config.attention_bias),
            qk_norm=self._qk_norm(attention) if config.has_qk_norm else None,
            attention_output=self.linear(f"{attention}.o_proj", has_bias=config.attention_output_bias),
            mlp_norm=self.keep(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", has_bias=config.mlp_bias),
            down=self.linear(f"{mlp}.down_proj", has_bias=config.mlp_bias),
        )

    def _qk_norm(self, attention: str) -> Tensor:
        q, k = (self._weights.pop(f"{attention}.{part}_norm.weight") for part in "qk")
        return torch.cat((q.expand(self._config.num_heads, -1), k.expand(self._config.num_kv_heads, -1)))


class Decoder:
    """Weights as the kernels want them, and the pass over them."""

    @torch.inference_mode()
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kernels: KernelSet) -> None:
        """weights: complete and of the right shapes (the loader checked), all of one dtype and device. Emptied."""
        self.config = config
        self._kernels = kernels
        packer = _WeightPacker(config, weights, kernels)
        self._embedding = packer.keep("model.embed_tokens.weight")
        self._layers = tuple(packer.layer(index) for index in range(config.num_layers))
        self._norm = packer.keep("model.norm.weight")
        self._head = packer.head(self._embedding)
        self._inv_freq = torch.tensor(config.inv_freq(), dtype=torch.float32, device=self.device)
        weights.clear()

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @torch.inference_mode()
    def forward(self, batch: DecoderInput, kv_layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [len(logit_indices), vocab_size] in float32; writes the tokens' keys and values into the cache.

        kv_layers: of each layer the key and the value cache, [blocks, block_size, num_kv_heads, head_dim].
        """
        config, kernels = self.config, self._kernels
        turn = kernels.rotation(batch.positions, self._inv_freq, self.dtype)
        plan = kernels.plan_attention(batch.rows, kv_layers[0][0], config.num_heads, config.sliding_window)
        x = self._embedding[batch.token_ids]
        for layer, (k_cache, v_cache) in zip(self._layers, kv_layers, strict=True):
            normed = kernels.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            x += self._attention(layer, normed, turn, plan, batch.slot_mapping, k_cache, v_cache)
            normed = kernels.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x += layer.down(kernels.swiglu(layer.gate_up(normed)))
        last = kernels.rms_norm(x[batch.logit_indices], self._norm, config.rms_norm_eps)
        return self._head(last).float()

    def _attention(
        self,
        layer: _Layer,
        x: Tensor,
        turn: Rotation,
        plan: AttentionPlan,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), -1, self.config.head_dim)
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk = self._kernels.rms_norm(qk, layer.qk_norm, self.config.rms_norm_eps)
        q = self._kernels.rope_kv_write(qk, v, turn, k_cache, v_cache, slot_mapping)
        return layer.attention_output(plan.attend(q, k_cache, v_cache).flatten(1))
