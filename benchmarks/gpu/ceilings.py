"""What this GPU can do at best, measured: the two rates that the others are shares of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.device import Gpu
from gpu.rows import Row
from gpu.sizes import Sizes


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_per_s: read and written, of a copy within the GPU. flops_per_s: of a product of bfloat16 matrices."""

    copy_bytes_per_s: float
    flops_per_s: float

    def rows(self, stage: str) -> list[Row]:
        return [
            Row(stage, "copy bandwidth, read and written", self.copy_bytes_per_s / 1e9, "GB/s"),
            Row(stage, "product of bf16 matrices", self.flops_per_s / 1e12, "TFLOP/s"),
        ]


def measure_ceilings(sizes: Sizes, gpu: Gpu) -> Ceilings:
    ceilings = Ceilings(_copy_rate(sizes.copy_bytes, gpu), _matrix_rate(sizes.matrix, gpu))
    gpu.release()
    return ceilings


def _copy_rate(num_bytes: int, gpu: Gpu) -> float:
    source = gpu.random(num_bytes // 2)
    target = torch.empty_like(source)
    return 2 * num_bytes / gpu.call_ms(lambda: target.copy_(source)) * 1e3


def _matrix_rate(n: int, gpu: Gpu) -> float:
    # the CPU has no fast product of bfloat16
    dtype = torch.float32 if gpu.is_interpreted else torch.bfloat16
    a, b = (gpu.random(n * n, dtype).view(n, n) for _ in "ab")
    return 2 * n**3 / gpu.call_ms(lambda: a @ b) * 1e3
