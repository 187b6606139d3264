"""WeightPacker: takes a model's weights by their Hugging Face names, and hands them on fused to who computes with them.

Knows which weights are one layer, and nothing of how a layer is laid out or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from noria.models.model_config import ModelConfig
from noria.models.weights import HEAD

# what became of a weight that is read as it is, and of a linear layer's
Kept = TypeVar("Kept")
Packed = TypeVar("Packed")


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Kept, Packed]):
    """qk_norm: [num_heads + num_kv_heads, head_dim], each head's weight; None where the family has none."""

    attention_norm: Kept
    qkv: Packed
    qk_norm: Kept | None
    attention_output: Packed
    mlp_norm: Kept
    gate_up: Packed
    down: Packed


class WeightPacker(Generic[Kept, Packed]):
    """Takes weights out of a dict as it goes, so that never two copies of all exist."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        keep: Callable[[Tensor], Kept],
        pack: Callable[[Tensor, Tensor | None], Packed],
    ) -> None:
        """pack: of a weight [outputs, inputs] and a bias [outputs] or none."""
        self._config = config
        self._weights = weights
        self._keep = keep
        self._pack = pack

    def take(self, name: str) -> Tensor:
        return self._weights.pop(name)

    def keep(self, name: str) -> Kept:
        """A weight that is not a linear layer's."""
        return self._keep(self.take(name))

    def head(self, embedding: Tensor) -> Tensor:
        """[vocab_size, hidden_size], not packed. embedding: of that shape, which may be the head too."""
        return embedding if self._config.tie_word_embeddings else self.take(HEAD)

    def layers(self) -> tuple[LayerWeights[Kept, Packed], ...]:
        return tuple(self._layer(index) for index in range(self._config.num_layers))

    def _layer(self, index: int) -> LayerWeights[Kept, Packed]:
        config = self._config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=self.keep(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"], config.attention_bias),
            qk_norm=self._keep(self._qk_norm(attention)) if config.has_qk_norm else None,
            attention_output=self._linear([f"{attention}.o_proj"], config.attention_output_bias),
            mlp_norm=self.keep(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], config.mlp_bias),
        )

    def _linear(self, names: Sequence[str], has_bias: bool) -> Packed:
        """One layer that computes the outputs of all named ones, one after the other."""
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        bias = torch.cat([self.take(f"{name}.bias") for name in names]) if has_bias else None
        return self._pack(weight, bias)

    def _qk_norm(self, attention: str) -> Tensor:
        q, k = (self.take(f"{attention}.{part}_norm.weight") for part in "qk")
        return torch.cat((q.expand(self._config.num_heads, -1), k.expand(self._config.num_kv_heads, -1)))
