"""KernelSet: the operators that the decoder is made of, passed to it explicitly.

Each operator has a file of its own with its formula. Knows nothing of models; picks no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noria.kernels.linear import Linear, pack_linear
from noria.kernels.paged_attention import AttentionPlan, AttentionRow, plan_attention
from noria.kernels.rms_norm import rms_norm
from noria.kernels.rope_kv_write import Rotation, rope_kv_write, rotation
from noria.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class KernelSet:
    """See the file of each operator for shapes; a second set must agree with the torch one to rounding."""

    pack_linear: Callable[[Tensor, Tensor | None], Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotation: Callable[[Tensor, Tensor, torch.dtype], Rotation]
    rope_kv_write: Callable[[Tensor, Tensor, Rotation, Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    plan_attention: Callable[[Sequence[AttentionRow], Tensor, int, int | None], AttentionPlan]


def torch_kernels() -> KernelSet:
    """The reference set, which is also what a CPU runs."""
    return KernelSet(
        pack_linear=pack_linear,
        rms_norm=rms_norm,
        rotation=rotation,
        rope_kv_write=rope_kv_write,
        swiglu=swiglu,
        plan_attention=plan_attention,
    )
