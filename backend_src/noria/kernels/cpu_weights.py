"""CpuWeights: weights in the layouts that the compiled CPU kernels read, and the memory that holds them."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from noria.kernels.cpu_library import INT4_GROUP, INT4_PANEL_BYTES, PANEL, WEIGHT_FORMATS, LinearStruct
from noria.kernels.huge_pages import Arena

# of float16
MAX_INT4 = 65504.0
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

        Raises ValueError for finite weights that int4, whose scales and minima are float16, does not hold.
        """
        num_outputs, num_inputs = weight.shape
        weight = weight.contiguous()
        num_panels = -(-num_outputs // PANEL)
        scale = None
        if weight_format == "int8":
            packed = self._arena.empty(num_panels * PANEL * (num_inputs + num_inputs % 2), torch.int8)
            scale = self._arena.empty(num_outputs, torch.float32)
            self.kept.append(scale)
            self._library.noria_pack_int8(
                weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr(), scale.data_ptr()
            )
        elif weight_format == "int4":
            largest = weight.abs().max().item()
            if MAX_INT4 < largest < math.inf:
                raise ValueError(
                    f"weight_quantization: int4 holds weights of up to {MAX_INT4:,.0f} to either side, and the model "
                    f"has one of {largest:,.0f}: use int8"
                )
            packed = self._arena.empty(num_panels * -(-num_inputs // INT4_GROUP) * INT4_PANEL_BYTES, torch.uint8)
            self._library.noria_pack_int4(weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
        else:
            packed = self._arena.empty(num_panels * PANEL * num_inputs, torch.float32)
            self._library.noria_pack_float32(weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
        self.kept.append(packed)
        return LinearStruct(
            weight=packed.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            bias=None if bias is None else self.keep(bias),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            format=WEIGHT_FORMATS[weight_format],
        )
