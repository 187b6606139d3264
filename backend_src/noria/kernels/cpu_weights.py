"""CpuWeights: weights in the layouts that the compiled CPU kernels read, and the memory that holds them."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from noria.kernels.cpu_library import PACKED_BYTES, PANEL, WEIGHT_FORMATS, LinearStruct
from noria.kernels.huge_pages import Arena

# that its scales and minima, which are float16, can stand for
LARGEST = {"int8": 127 * 65504.0, "int4": 65504.0}
# what the widest load wants
_ALIGNMENT = 64
_CHUNK_BYTES = 2**25


class CpuWeights:
    """Addresses that it gives stay good as long as it lives. kept: all that is behind them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._arena = Arena(_CHUNK_BYTES, _ALIGNMENT)
        self.kept: list[Tensor] = []

    def keep(self, tensor: Tensor) -> int:
        """The address of a copy, float32: what the loader gave may be a view of a file."""
        copy = self._arena.empty(tensor.numel(), torch.float32)
        copy.copy_(tensor.flatten())
        self.kept.append(copy)
        return copy.data_ptr()

    def pack(self, weight_format: str, weight: Tensor, bias: Tensor | None = None) -> LinearStruct:
        """weight [outputs, inputs] float32, bias [outputs]. weight_format: of WEIGHT_FORMATS; see cpu/linear.h.

        Raises ValueError for finite weights that the format does not hold.
        """
        num_outputs, num_inputs = weight.shape
        weight = weight.contiguous()
        if weight_format == "float32":
            inputs_of_group, group_bytes = 1, PANEL * weight.itemsize
        else:
            _check_size(weight, weight_format)
            inputs_of_group, group_bytes = PACKED_BYTES[weight_format]
        num_groups = -(-num_outputs // PANEL) * -(-num_inputs // inputs_of_group)
        packed = self._arena.empty(num_groups * group_bytes, torch.uint8)
        pack = getattr(self._library, f"noria_pack_{weight_format}")
        pack(weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
        self.kept.append(packed)
        return LinearStruct(
            weight=packed.data_ptr(),
            bias=None if bias is None else self.keep(bias),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            format=WEIGHT_FORMATS[weight_format],
        )


def _check_size(weight: Tensor, weight_format: str) -> None:
    largest = weight.abs().max().item()
    limit = LARGEST[weight_format]
    if limit < largest < math.inf:
        other = "int8" if largest <= LARGEST["int8"] else "none"
        raise ValueError(
            f"weight_quantization: {weight_format} holds weights of up to {limit:,.0f} to either side, and the model "
            f"has one of {largest:,.0f}: use {other}"
        )
