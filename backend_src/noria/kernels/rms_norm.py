"""RMS norm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight.

The mean is over the last dimension, in float32.

x [..., features], weight [features] or any shape that broadcasts against x, y like x
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
