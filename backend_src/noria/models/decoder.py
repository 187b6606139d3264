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
from noria.kernels.paged_attention import AttentionPlan, AttentionRow, AttentionShape
from noria.kernels.rope_kv_write import Rotation
from noria.models.model_config import ModelConfig
from noria.models.weight_packer import LayerWeights, WeightPacker
from noria.models.weights import EMBEDDING, FINAL_NORM


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


class Decoder:
    """Weights as the kernels want them, and the pass over them."""

    @torch.inference_mode()
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kernels: KernelSet) -> None:
        """weights: complete and of the right shapes (the loader checked), all of one dtype and device. Emptied."""
        self.config = config
        self._kernels = kernels
        # copied, since what the loader gave may be a view of a file
        packer = WeightPacker(config, weights, Tensor.clone, kernels.pack_linear)
        self._embedding = packer.take(EMBEDDING).clone()
        self._layers = packer.layers()
        self._norm = packer.keep(FINAL_NORM)
        self._head = kernels.pack_linear(packer.head(self._embedding), None)
        self._inv_freq = torch.tensor(config.inv_freq(), dtype=torch.float32, device=self.device)
        weights.clear()

    @property
    def attention_shape(self) -> AttentionShape:
        config = self.config
        return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window)

    @property
    def is_deterministic(self) -> bool:
        return self._kernels.is_deterministic

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
        plan = self._kernels.plan_attention(batch.rows, kv_layers[0][0], self.attention_shape)
        return self.run(batch, plan, kv_layers)

    @torch.inference_mode()
    def run(self, batch: DecoderInput, plan: AttentionPlan, kv_layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """`forward` with the attention planned already; the rows of `batch` are not read, only its tensors."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        turn = kernels.rotation(batch.positions, self._inv_freq, self.dtype)
        x = self._embedding[batch.token_ids]
        # what the layer before adds to x is added where x is read next
        delta: Tensor | None = None

        def normed(weight: Tensor) -> Tensor:
            return kernels.rms_norm(x, weight, eps) if delta is None else kernels.add_rms_norm(x, delta, weight, eps)

        for layer, (k_cache, v_cache) in zip(self._layers, kv_layers, strict=True):
            delta = self._attention(layer, normed(layer.attention_norm), turn, plan, batch, k_cache, v_cache)
            delta = layer.down(kernels.swiglu(layer.gate_up(normed(layer.mlp_norm))))
        assert delta is not None, "a model has at least one layer"
        x, delta = x[batch.logit_indices], delta[batch.logit_indices]
        return self._head(normed(self._norm)).float()

    def _attention(
        self,
        layer: LayerWeights[Tensor, Linear],
        x: Tensor,
        turn: Rotation,
        plan: AttentionPlan,
        batch: DecoderInput,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), -1, self.config.head_dim)
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk = self._kernels.rms_norm(qk, layer.qk_norm, self.config.rms_norm_eps)
        q = self._kernels.rope_kv_write(qk, v, turn, k_cache, v_cache, batch.slot_mapping)
        return layer.attention_output(plan.attend(q, k_cache, v_cache).flatten(1))
