"""QuantisedLinear: a linear layer with weights of one byte and a scale for each output; activations stay as they are.

weight = number * scale, scale = largest magnitude of the output's weights / LARGEST[dtype]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from noria.kernels.kv_format import LARGEST
from noria.kernels.matmul import DTYPES
from noria.kernels.quantised_matmul import quantised_matmul_triton

# by their names in the engine's configuration
WEIGHT_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """numbers [out_features, in_features] int8 or float8_e4m3fn, scales [out_features] float32. For a GPU."""

    numbers: Tensor
    scales: Tensor
    bias: Tensor | None
    is_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        return quantised_matmul_triton(x, self.numbers, self.scales, self.bias, is_invariant=self.is_invariant)

    def dequantised(self) -> Tensor:
        """[out_features, in_features] float32."""
        return self.numbers.float() * self.scales[:, None]


def quantise_linear(
    weight: Tensor, bias: Tensor | None, weight_quantization: str, is_invariant: bool
) -> QuantisedLinear:
    """weight_quantization: of WEIGHT_DTYPES. Raises ValueError for weights that it does not hold."""
    if weight.dtype not in DTYPES:
        raise ValueError(
            f"weight_quantization: {weight_quantization} is made of weights in float32, float16 or bfloat16, "
            f"not {weight.dtype}"
        )
    dtype = WEIGHT_DTYPES[weight_quantization]
    # of a copy, as it is scaled in place; also what is finite in float32 alone
    numbers = weight.to(torch.float32, copy=True)
    largest = numbers.abs().amax(dim=1)
    if not largest.isfinite().all():
        raise ValueError(
            f"weight_quantization: {weight_quantization} takes finite weights, and the model has one that is "
            "infinite or not a number: use none"
        )
    scales = largest / LARGEST[dtype]
    # all zero, or so small that the scale is; the numbers are then zero, and not 0 / 0
    scales[scales == 0] = 1.0
    numbers /= scales[:, None]
    if dtype == torch.int8:
        numbers.round_()
    # past it only by the rounding of a scale; float8_e4m3fn would be NaN there
    numbers.clamp_(-LARGEST[dtype], LARGEST[dtype])
    return QuantisedLinear(numbers.to(dtype), scales, bias, is_invariant)


def quantisation_error(weight: Tensor, linear: QuantisedLinear) -> float:
    """Of the weights, relative, by the Frobenius norm: |dequantised - weight| / |weight|. 0 where all weights are 0."""
    difference = linear.dequantised().sub_(weight)
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in (difference, weight)]
    return norms[0] / norms[1] if norms[1] else 0.0


@dataclass(slots=True)
class QuantisationErrors:
    """What rounding did to the layers of a model, for one line of the log."""

    weight_quantization: str
    of_layers: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.of_layers:
            return f"weights {self.weight_quantization}: no layers"
        mean = sum(self.of_layers) / len(self.of_layers)
        return (
            f"weights {self.weight_quantization}: relative error {mean:.2%} on average, "
            f"{max(self.of_layers):.2%} in the worst of {len(self.of_layers)} layers"
        )
