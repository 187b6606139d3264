"""Linear layer: y = x W^T + b, with the weights laid out once, at load, for the device that computes it.

    x [rows, in_features], W [out_features, in_features], b [out_features] or none, y [rows, out_features]

On an x86 CPU in float32 oneDNN reads weights from its own blocked layout about twice as fast as from rows (all linear
layers of SmolLM2-135M, 2 cores, 8 rows: 61 ms against 97 ms a step), and there a row's result does not change with
the number of rows beside it, which an ordinary matrix product does not promise. On a GPU cuBLAS computes with the
weights as they are; `linear_packer` has what cuBLAS does not do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from noria.kernels.matmul import DTYPES, matmul_triton
from noria.kernels.quantised_linear import WEIGHT_DTYPES, QuantisationErrors, quantisation_error, quantise_linear

Linear = Callable[[Tensor], Tensor]

# rows that oneDNN lays the weights out for; any number can be computed. 1 to 16 were equally good, 1 worse at 4 rows
_PACKED_FOR_ROWS = 8


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The reference: weights as they were loaded."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """oneDNN's layout; `weight` is opaque to every other operator."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """For a GPU: a row's result depends, to the bit, on nothing beside it."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return matmul_triton(x, self.weight, self.bias)


def linear_packer(
    weight_quantization: str, is_deterministic: bool, errors: QuantisationErrors | None = None
) -> Callable[[Tensor, Tensor | None], Linear]:
    """`pack_linear` for a GPU: its layers, or ones of `weight_quantization`, none or of WEIGHT_DTYPES.

    errors: takes in the error of each layer that is quantised. Raises ValueError for another name, and what it returns
    for weights that cannot be packed so.
    """
    if weight_quantization not in ("none", *WEIGHT_DTYPES):
        valid = ", ".join(("none", *WEIGHT_DTYPES))
        raise ValueError(f"weight_quantization on a GPU must be one of {valid}, not {weight_quantization}")

    def quantise(weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear = quantise_linear(weight, bias, weight_quantization, is_deterministic)
        if errors is not None:
            errors.of_layers.append(quantisation_error(weight, linear))
        return linear

    if weight_quantization != "none":
        return quantise
    return _pack_invariant if is_deterministic else pack_linear


def _pack_invariant(weight: Tensor, bias: Tensor | None = None) -> Linear:
    if weight.dtype not in DTYPES:
        raise ValueError(f"deterministic: takes weights in float32, float16 or bfloat16, not {weight.dtype}")
    return InvariantLinear(weight.contiguous(), bias)


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The layer for these weights. A packed one is a copy: let go of `weight` after this."""
    if _can_pack(weight):
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS), bias)
    return PlainLinear(weight, bias)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        # not part of torch's public interface: absent from some builds, and could go
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
