"""How long a step would take on a machine that one does not have: a roofline (Williams et al. 2009).

A step takes as long as the slower of two things that overlap: reading the weights and the cached keys and values, and
the arithmetic. It is a bound from below: kernels reach neither peak, and nothing else is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noria.scheduler_output import SchedulerOutput
from noria.simulation.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class Chip:
    """flops_per_s: dense, in the dtype of the weights."""

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the Llama family. bytes_per_weight, bytes_per_kv: of one number. has_tied_embeddings: the LM head's
    matrix is the embedding's."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    has_tied_embeddings: bool = False

    @property
    def num_layer_weights(self) -> int:
        """In the linear layers of all decoder layers."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_weights(self) -> int:
        """All parameters, norms included."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layer_weights + norms + (1 if self.has_tied_embeddings else 2) * self.num_head_weights

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv


# sources: NVIDIA's data sheets, SXM where there is one, fp16 without sparsity
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("H100", 3.35e12, 989e12, 80e9),
        Chip("H200", 4.8e12, 989e12, 141e9),
        Chip("A100-80G", 2.039e12, 312e12, 80e9),
        Chip("L40S", 864e9, 362e12, 48e9),
        Chip("L4", 300e9, 121e12, 24e9),
    )
}

# sources: each model's config.json
MODEL_SHAPES: Mapping[str, ModelShape] = {
    "Llama-2-7B": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "Llama-3.1-8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama-3.2-1B": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, has_tied_embeddings=True),
    "SmolLM2-135M": ModelShape(30, 576, 1536, 9, 3, 64, 49152, has_tied_embeddings=True),
}


class StepCost(NamedTuple):
    """Seconds that each part of a step would take alone."""

    weights_s: float
    kv_s: float
    arithmetic_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s + self.kv_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        """What the step waits for: arithmetic, weights or kv (reading them)."""
        if self.arithmetic_s > self.weights_s + self.kv_s:
            return "arithmetic"
        return "weights" if self.weights_s >= self.kv_s else "kv"


class AnalyticCostModel:
    """A CostModel from data sheets."""

    def __init__(self, chip: Chip, model: ModelShape) -> None:
        self.chip = chip
        self.model = model
        self._weights_s = (
            model.bytes_per_weight * (model.num_layer_weights + model.num_head_weights) / chip.memory_bytes_per_s
        )
        self._kv_s_per_token = model.kv_bytes_per_token / chip.memory_bytes_per_s
        # a multiplication and an addition per weight; per pair, for the scores and again for the sum over the values
        self._token_s = 2 * model.num_layer_weights / chip.flops_per_s
        self._sampled_row_s = 2 * model.num_head_weights / chip.flops_per_s
        self._pair_s = 4 * model.num_layers * model.num_heads * model.head_dim / chip.flops_per_s

    def step_time_s(self, output: SchedulerOutput) -> float:
        return self.cost_of(StepShape.of(output)).seconds

    def cost_of(self, shape: StepShape) -> StepCost:
        """One token of a decode row makes as many pairs as it has context. Swapped blocks cost nothing here."""
        return StepCost(
            weights_s=self._weights_s,
            kv_s=self._kv_s_per_token * (shape.num_decode_context + shape.num_prefill_context),
            arithmetic_s=self._token_s * shape.num_tokens
            + self._sampled_row_s * shape.num_sampled_rows
            + self._pair_s * (shape.num_decode_context + shape.num_prefill_pairs),
        )

    def num_kv_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """Blocks of `block_size` tokens that fit beside the weights into `memory_share` of the chip's memory.

        Raises ValueError if the weights alone do not.
        """
        left = memory_share * self.chip.memory_bytes - self.model.bytes_per_weight * self.model.num_weights
        num_blocks = int(left / (self.model.kv_bytes_per_token * block_size))
        if num_blocks < 1:
            raise ValueError(f"the weights do not fit into {memory_share:.0%} of the memory of {self.chip.name}")
        return num_blocks


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step that decodes `batch_size` sequences of `context` tokens each.

    bandwidth_share, arithmetic_share: of the chip's peaks. bound: see `StepCost.bound`.
    fits_memory: the weights and all sequences' keys and values do.
    """

    batch_size: int
    context: int
    step_s: float
    tokens_per_s: float
    bandwidth_share: float
    arithmetic_share: float
    bound: str
    fits_memory: bool


def decode_points(
    cost_model: AnalyticCostModel, batch_sizes: Sequence[int], contexts: Sequence[int]
) -> list[DecodePoint]:
    """How far one read of the weights carries as more sequences share it, by context, then by batch size."""
    return [_decode_point(cost_model, size, context) for context in contexts for size in batch_sizes]


def _decode_point(cost_model: AnalyticCostModel, batch_size: int, context: int) -> DecodePoint:
    model = cost_model.model
    shape = StepShape(
        num_tokens=batch_size,
        num_decode_rows=batch_size,
        num_decode_context=batch_size * context,
        num_sampled_rows=batch_size,
    )
    cost = cost_model.cost_of(shape)
    num_bytes = model.bytes_per_weight * model.num_weights + model.kv_bytes_per_token * batch_size * context
    return DecodePoint(
        batch_size=batch_size,
        context=context,
        step_s=cost.seconds,
        tokens_per_s=batch_size / cost.seconds,
        bandwidth_share=(cost.weights_s + cost.kv_s) / cost.seconds,
        arithmetic_share=cost.arithmetic_s / cost.seconds,
        bound=cost.bound,
        fits_memory=num_bytes <= cost_model.chip.memory_bytes,
    )
