"""SwiGLU (Shazeer 2020): y = silu(gate) * up, silu(z) = z / (1 + exp(-z)).

gate_up [rows, 2 * features]: gate in the first half of each row, up in the second; y [rows, features]
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from noria.kernels.language import tl, triton

# features of one row that one program takes: 8 for each thread of 4 warps
_TILE = 1024


@triton.jit
def _swiglu_kernel(
    y_ptr: tl.tensor,  # [rows, FEATURES] contiguous
    gate_up_ptr: tl.tensor,  # [rows, 2 * FEATURES]
    row_stride: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    mask = features < FEATURES
    gate_ptrs = gate_up_ptr + row * row_stride + features
    gate = tl.load(gate_ptrs, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + FEATURES, mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * FEATURES + features, y.to(y_ptr.dtype.element_ty), mask)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """y, contiguous. Rows may lie apart. Raises ValueError where gate_up is not [rows, an even number]."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            "gate_up must be [rows, 2 * features], its features side by side, "
            f"not {list(gate_up.shape)} with strides {gate_up.stride()}"
        )
    num_rows, num_features = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, num_features)
    if y.numel() == 0:
        return y
    tile = min(_TILE, triton.next_power_of_2(num_features))
    _swiglu_kernel[(num_rows, triton.cdiv(num_features, tile))](
        y, gate_up, gate_up.stride(0), FEATURES=num_features, BLOCK_FEATURES=tile, num_warps=4
    )
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
