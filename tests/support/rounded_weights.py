"""What the compiled kernels' int8 and int4 stand for, worked out with torch: weights, and rows of activations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from noria.kernels.cpu_library import GROUP


def in_groups(x: Tensor) -> Tensor:
    """[rows, inputs] to [rows, groups, 32], with zeros beyond the last input."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def int8_weights(weight: Tensor) -> Tensor:
    """[outputs, inputs] float64: what the packed numbers stand for."""
    groups = in_groups(weight)
    wanted = groups.abs().amax(2, keepdim=True) / 127
    nearest = wanted.half()
    # never below what is wanted
    higher = torch.from_numpy(np.nextafter(nearest.numpy(), np.float16(np.inf)))
    scale = torch.where(nearest.float() < wanted, higher, nearest).float()
    whole = torch.where(scale > 0, (groups / scale).round().clamp(-127, 127), 0)
    return (whole.double() * scale.double()).flatten(1)[:, : weight.shape[1]]


def int4_weights(weight: Tensor) -> Tensor:
    """[outputs, inputs] float64: what the packed numbers stand for."""
    whole = torch.arange(weight.shape[1])
    rounded = torch.zeros(weight.shape, dtype=torch.float64)
    for first in range(0, weight.shape[1], GROUP):
        group = whole[first : first + GROUP]
        numbers = weight[:, group]
        low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
        minimum, scale = low.half().float(), ((high - low) / 15).half().float()
        steps = torch.where(scale > 0, ((numbers - minimum) / scale).round().clamp(0, 15), 0)
        rounded[:, group] = minimum.double() + scale.double() * steps.double()
    return rounded


def rounded_activations(x: Tensor) -> Tensor:
    """[rows, inputs] float64: what the rounded numbers stand for."""
    groups = in_groups(x)
    top = groups.abs().amax(2, keepdim=True)
    whole = torch.where(top > 0, (groups * torch.tensor(127.0).div(top)).round(), 0)
    return (whole.double() * (top / 127).double()).flatten(1)[:, : x.shape[1]]
