"""Sends arrays of the host to a device in one copy.

A copy from page-locked memory is only queued: the host goes on, and what the same stream computes later sees it done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Triton compiles a kernel anew for a pointer that 16 bytes do not divide
ALIGNMENT = 16

Arrays = Sequence[NDArray[Any]]


def upload(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """Tensors of the arrays' shapes and dtypes on the device, each at a multiple of 16 bytes.

    On a CPU they may be the arrays themselves, which are not to be changed afterwards.
    """
    if device.type == "cpu":
        # numpy's own memory is aligned so; a copy of all together would take 50 us
        return [torch.from_numpy(np.require(array, requirements=("C", "A", "W"))) for array in arrays]
    return views(packed(arrays, device).to(device, non_blocking=True), arrays)


def packed(arrays: Arrays, device: torch.device) -> Tensor:
    """Their bytes in one tensor [bytes] of the host, page-locked where the device is a GPU."""
    host = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = host.numpy()
    for start, array in zip(_starts(arrays), arrays, strict=False):
        target[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return host


def views(buffer: Tensor, arrays: Arrays) -> list[Tensor]:
    """The tensors that a copy of `packed(arrays)` holds; of the arrays only shapes and dtypes are read."""
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    ]


def _starts(arrays: Arrays) -> list[int]:
    """Where each begins, and where the last ends."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts
