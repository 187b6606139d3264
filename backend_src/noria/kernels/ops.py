"""KernelSet: the operators that the decoder is made of, passed to it explicitly.

Each operator has a file of its own with its formula, its Triton kernel and torch's definition of it. Knows nothing of
models; picks no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noria.kernels.linear import Linear, linear_packer, pack_linear
from noria.kernels.paged_attention import AttentionPlan, AttentionRow, AttentionShape, plan_attention
from noria.kernels.quantised_linear import QuantisationErrors
from noria.kernels.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm, rms_norm_triton
from noria.kernels.rope_kv_write import rope_kv_write, rope_kv_write_triton, rotation, rotation_triton
from noria.kernels.swiglu import swiglu, swiglu_triton
from noria.kernels.triton_attention import plan_attention_triton


@dataclass(frozen=True, slots=True)
class KernelSet:
    """See the file of each operator for shapes; a second set must agree with the torch one to rounding.

    What `rotation` returns is for `rope_kv_write` alone, and each set's plan of attention for its own caches.
    """

    pack_linear: Callable[[Tensor, Tensor | None], Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotation: Callable[[Tensor, Tensor, torch.dtype], Any]
    rope_kv_write: Callable[[Tensor, Tensor, Any, Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    plan_attention: Callable[[Sequence[AttentionRow], Tensor, AttentionShape], AttentionPlan]
    is_deterministic: bool = False


def torch_kernels() -> KernelSet:
    """The reference set, which is also what a CPU runs."""
    return KernelSet(
        pack_linear=pack_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotation=rotation,
        rope_kv_write=rope_kv_write,
        swiglu=swiglu,
        plan_attention=plan_attention,
    )


def triton_kernels(
    dtype: torch.dtype,
    weight_quantization: str = "none",
    is_deterministic: bool = False,
    errors: QuantisationErrors | None = None,
) -> KernelSet:
    """The set for a GPU. dtype: of the activations. weight_quantization: none, int8 or fp8; errors: see linear_packer.

    is_deterministic: matrix products and attention whose rows have the same bits whatever is computed beside them, and
    in whatever chunks; without it matrix products are cuBLAS's, and may not be.
    """
    return KernelSet(
        pack_linear=linear_packer(weight_quantization, is_deterministic, errors),
        rms_norm=rms_norm_triton,
        add_rms_norm=add_rms_norm_triton,
        rotation=rotation_triton,
        rope_kv_write=rope_kv_write_triton,
        swiglu=swiglu_triton,
        plan_attention=partial(plan_attention_triton, dtype=dtype, is_deterministic=is_deterministic),
        is_deterministic=is_deterministic,
    )
