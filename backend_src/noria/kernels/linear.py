"""Linear layer: y = x W^T + b, with the weights laid out once, at load, for the device that computes it.

    x [rows, in_features], W [out_features, in_features], b [out_features] or none, y [rows, out_features]

On an x86 CPU in float32 oneDNN reads weights from its own blocked layout about twice as fast as from rows (all linear
layers of SmolLM2-135M, 2 cores, 8 rows: 61 ms against 97 ms a step), and there a row's result does not change with
the number of rows beside it, which an ordinary matrix product does not promise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

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
