"""Comparison of what a kernel computed with what it should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.device import Gpu

# of `relative_error`: some four times what the rounding of a result explains, and in float32 the sum before it
TOLERANCES = {torch.float32: 5e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Check:
    """launch: launches kernels and returns what they wrote; runs on tensors of the device "meta" too.

    expected: called afterwards. tolerance: None demands the same bits. A row is along the last dimension.
    max_share: without a tolerance, the share of numbers whose bits may differ.
    """

    name: str
    launch: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    tolerance: float | None = None
    max_share: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """error: as `relative_error`; or, where bits were to be the same, the share of numbers that differ."""

    name: str
    error: float
    tolerance: float | None
    is_met: bool


def evaluate(check: Check, gpu: Gpu) -> Outcome:
    found = check.launch()
    gpu.synchronize()
    expected = check.expected()
    if found.shape != expected.shape:
        raise ValueError(f"{check.name}: {list(found.shape)}, not {list(expected.shape)}")
    if check.tolerance is None:
        share = differing_share(found, expected)
        return Outcome(check.name, share, None, share <= check.max_share)
    error = relative_error(found, expected)
    # NaN is no error that is small enough
    return Outcome(check.name, error, check.tolerance, error <= check.tolerance)


def differing_share(found: Tensor, expected: Tensor) -> float:
    """By bits, so that NaN equals itself, and 0 is not -0."""
    if found.dtype != expected.dtype:
        raise ValueError(f"{found.dtype}, not {expected.dtype}")
    if found.numel() == 0:
        return 0.0
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    return (found.contiguous().view(words) != expected.contiguous().view(words)).float().mean().item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a number, over its own size and the root mean square of its row together.

    NaN where there is one.
    """
    if found.numel() == 0:
        return 0.0
    found, expected = found.double(), expected.double()
    scale = expected.square().mean(-1, keepdim=True).sqrt()
    # a row of zeros is held to a thousandth of the others
    scale = scale.clamp(min=max(1e-3 * scale.mean().item(), 1e-30))
    return ((found - expected).abs() / (scale + expected.abs())).max().item()
