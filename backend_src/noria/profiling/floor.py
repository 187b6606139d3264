"""What a step cannot do without, in bytes read and multiply-adds, and how soon a machine could be done with it.

The floor of a part is the longer of two times: reading its weights, keys and values once at the rate at which the
machine reads memory, and computing its products at the rate of the kernels on inputs that stay in the cache. Norms,
activations, embeddings, logits and what is written count nothing. Knows nothing of how a step is computed or timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from noria.models.model_config import ModelConfig
from noria.models.weights import EMBEDDING, HEAD, expected_weights
from noria.scheduler_output import ScheduledSequence, SchedulerOutput

# the parts of a step that have a floor
LINEAR, HEAD_PART, ATTENTION = "linear", "head", "attention"


@dataclass(frozen=True, slots=True)
class Work:
    """num_bytes: read from memory. The others are multiply-adds, apart where they may be of different numbers:
    num_weight_macs with the layers' weights, num_attention_macs, which are in float32, and num_head_macs."""

    num_bytes: float = 0.0
    num_weight_macs: int = 0
    num_attention_macs: int = 0
    num_head_macs: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_bytes + other.num_bytes,
            self.num_weight_macs + other.num_weight_macs,
            self.num_attention_macs + other.num_attention_macs,
            self.num_head_macs + other.num_head_macs,
        )


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What all threads together read from memory, and compute on inputs in their caches."""

    bytes_per_s: float
    weight_macs_per_s: float
    attention_macs_per_s: float
    head_macs_per_s: float

    def read_s(self, work: Work) -> float:
        return work.num_bytes / self.bytes_per_s

    def compute_s(self, work: Work) -> float:
        return (
            work.num_weight_macs / self.weight_macs_per_s
            + work.num_attention_macs / self.attention_macs_per_s
            + work.num_head_macs / self.head_macs_per_s
        )

    def floor_s(self, work: Work) -> float:
        return max(self.read_s(work), self.compute_s(work))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Of linear layers, in bytes. per_weight: with a weight's part of what a group shares. per_bias: of a bias."""

    name: str
    per_weight: float
    per_bias: int

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of the weights [outputs, inputs] of one layer, without a bias."""
        return round(prod(shape) * self.per_weight)


class WorkCounter:
    """Counts the work of steps of one model with its formats."""

    def __init__(
        self, config: ModelConfig, weights: WeightFormat, head: WeightFormat, kv_bytes_per_token: float
    ) -> None:
        """weights: of all linear layers but the head. kv_bytes_per_token: of keys and values in all layers."""
        self._config = config
        self._kv_bytes_per_token = kv_bytes_per_token
        shapes = expected_weights(config)
        head_shape = shapes[EMBEDDING if config.tie_word_embeddings else HEAD]
        self._num_head_macs, self.head_bytes = prod(head_shape), head.num_bytes(head_shape)
        linears = [shape for name, shape in shapes.items() if len(shape) == 2 and name not in (EMBEDDING, HEAD)]
        self._num_linear_macs = sum(map(prod, linears))
        num_biases = sum(prod(shape) for name, shape in shapes.items() if name.endswith(".bias"))
        self.linear_bytes = sum(map(weights.num_bytes, linears)) + num_biases * weights.per_bias

    def parts(self, step: SchedulerOutput) -> dict[str, Work]:
        """The work of each part that has a floor. The weights are read once, for all rows together."""
        num_logits = sum(row.sampling is not None for row in step.rows)
        attention = Work()
        for row in step.rows:
            attention += self._attention(row)
        return {
            LINEAR: Work(self.linear_bytes, self._num_linear_macs * step.num_tokens),
            HEAD_PART: Work(self.head_bytes, num_head_macs=self._num_head_macs * num_logits) if num_logits else Work(),
            ATTENTION: attention,
        }

    def _attention(self, row: ScheduledSequence) -> Work:
        """Keys and values that any of the row's queries sees are read once; each query meets those that it sees."""
        config, num_queries, num_before = self._config, len(row.token_ids), row.num_computed_tokens
        window = config.sliding_window or num_before + num_queries
        num_read = min(num_before + num_queries, window + num_queries - 1)
        num_pairs = sum(min(num_before + index + 1, window) for index in range(num_queries))
        # a product with the key, and one with the value
        num_macs = 2 * config.num_layers * config.num_heads * config.head_dim * num_pairs
        return Work(num_read * self._kv_bytes_per_token, 0, num_macs)
