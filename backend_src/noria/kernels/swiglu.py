"""SwiGLU (Shazeer 2020): y = silu(gate) * up, silu(z) = z / (1 + exp(-z)).

gate_up [rows, 2 * features]: gate in the first half of each row, up in the second; y [rows, features]
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
