"""The kernels around attention, each against its definition in float64 or, where it moves bytes, against the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.checks import TOLERANCES, Check
from gpu.device import Gpu
from noria.kernels.block_copies import (
    copy_blocks,
    copy_blocks_triton,
    gather_blocks,
    gather_blocks_triton,
    scatter_blocks_triton,
)
from noria.kernels.kv_format import SCALE_BYTES, dequantised, is_quantised, paged_kv
from noria.kernels.matmul import matmul, matmul_triton
from noria.kernels.quantised_linear import WEIGHT_DTYPES, quantise_linear
from noria.kernels.quantised_matmul import quantised_matmul, quantised_matmul_triton
from noria.kernels.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm, rms_norm_triton
from noria.kernels.rope_kv_write import rope_kv_write, rope_kv_write_triton, rotation, rotation_triton
from noria.kernels.swiglu import swiglu, swiglu_triton

EPS = 1e-5
# a quantised number is off by half a step of its head's largest, or by a sixteenth of itself
_KV_TOLERANCES = {torch.int8: 0.03, torch.float8_e4m3fn: 0.1}
_QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Maker:
    """Makes inputs on the CPU from a seed, the same for the same calls; poison is left for the kernel's output."""

    gpu: Gpu
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return (torch.randn(shape, generator=self.generator) * std).to(self.dtype).to(self.device)

    def poisoned(self, num_numbers: int, launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if self.device.type != "meta":
                self.gpu.poison(num_numbers * self.dtype.itemsize)
            return launch()

        return run


def op_checks(dtype: torch.dtype, gpu: Gpu, device: torch.device | None = None) -> Iterator[Check]:
    """All of one dtype. device: meta, to compile; else the GPU's."""
    make = Maker(gpu, device or gpu.device, dtype, torch.Generator().manual_seed(5))
    yield from _norm_checks(make)
    yield from _rope_checks(make)
    yield from _copy_checks(make)
    yield from _matmul_checks(make)


def _norm_checks(make: Maker) -> Iterator[Check]:
    for rows, features in ((3, 576), (5, 2048), (2, 4096)):
        x, delta, weight = make.normal(rows, features), make.normal(rows, features), make.normal(features)
        # copied now: the kernel changes x in place
        doubles = [tensor.double() for tensor in (x, delta, weight)]
        tolerance = TOLERANCES[make.dtype]
        yield Check(
            f"rms_norm {features}",
            make.poisoned(x.numel(), partial(rms_norm_triton, x, weight, EPS)),
            partial(rms_norm, doubles[0], doubles[2], EPS),
            tolerance,
        )

        def add(x: Tensor = x, delta: Tensor = delta, weight: Tensor = weight) -> Tensor:
            total = x.clone()
            y = add_rms_norm_triton(total, delta, weight, EPS)
            return torch.cat((y, total))

        def added(doubles: list[Tensor] = doubles) -> Tensor:
            total = doubles[0].clone()
            y = add_rms_norm(total, doubles[1], doubles[2], EPS)
            return torch.cat((y, total))

        yield Check(f"add_rms_norm {features}", make.poisoned(x.numel(), add), added, tolerance)
    heads, weight = make.normal(4, 12, 64), make.normal(10, 64)
    yield Check(
        "rms_norm of heads",
        make.poisoned(40 * 64, lambda: rms_norm_triton(heads[:, :10], weight, EPS)),
        lambda: rms_norm(heads[:, :10].double(), weight.double(), EPS),
        TOLERANCES[make.dtype],
    )
    for rows, features in ((3, 1536), (2, 8192)):
        gate_up = make.normal(rows, 2 * features)
        yield Check(
            f"swiglu {features}",
            make.poisoned(rows * features, partial(swiglu_triton, gate_up)),
            partial(swiglu, gate_up.double()),
            TOLERANCES[make.dtype],
        )


def _rope_checks(make: Maker) -> Iterator[Check]:
    kv_dtypes = [make.dtype] if make.dtype == torch.float32 else [make.dtype, *_QUANTISED_DTYPES.values()]
    for (num_heads, kv_heads, dim), kv_dtype in (
        (h, kv) for h in ((32, 8, 128), (9, 3, 64), (8, 8, 80)) for kv in kv_dtypes
    ):
        yield _rope_check(make, num_heads, kv_heads, dim, kv_dtype)


def _rope_check(make: Maker, num_heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype) -> Check:
    """Queries, then what lies in the slots that were written, and that no other byte of the caches has changed."""
    positions = torch.tensor([0, 1, 17, 1000, 100_003, 131_071], dtype=torch.int64).to(make.device)
    slots = torch.tensor([5, 40, 17, 16, 63, 0], dtype=torch.int64).to(make.device)
    qkv = make.normal(len(positions), num_heads + 2 * kv_heads, dim)
    qk, v = qkv.split((num_heads + kv_heads, kv_heads), dim=1)
    inv_freq = (500000.0 ** (-torch.arange(dim // 2) * 2 / dim)).float().to(make.device)
    num_slots, block_size = 64, 16

    def caches(dtype: torch.dtype) -> list[Tensor]:
        width = block_size * kv_heads * (dim + SCALE_BYTES if is_quantised(dtype) else dim * dtype.itemsize)
        shape = (-1,) if is_quantised(dtype) else (block_size, kv_heads, dim)
        bytes_ = [
            torch.full((num_slots // block_size, width), 255, dtype=torch.uint8, device=make.device) for _ in "kv"
        ]
        return [x.view(dtype).view(num_slots // block_size, *shape) for x in bytes_]

    def read(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[tokens, 2 * kv_heads, dim] float64 of the written slots."""
        found = [
            dequantised(paged_kv(x, kv_heads, dim), torch.float64).flatten(0, 1)[slots] for x in (k_cache, v_cache)
        ]
        return torch.cat(found, dim=1)

    def launch() -> Tensor:
        k_cache, v_cache = caches(kv_dtype)
        turn = rotation_triton(positions, inv_freq, make.dtype)
        q = rope_kv_write_triton(qk, v, turn, k_cache, v_cache, slots)
        if make.device.type == "meta":
            return q
        untouched = [x for x in range(num_slots) if x not in slots.tolist()]
        for cache in (k_cache, v_cache):
            kv = paged_kv(cache, kv_heads, dim)
            for part in (kv.numbers, kv.scales):
                if part is not None:
                    rest = part.flatten(0, 1)[untouched].contiguous().view(torch.uint8)
                    assert (rest == 255).all(), "a slot was written that no token has"
        return torch.cat((q.double(), read(k_cache, v_cache)), dim=1)

    def expected() -> Tensor:
        k_cache, v_cache = caches(torch.float64)
        turn = rotation(positions, inv_freq, torch.float64)
        q = rope_kv_write(qk.double(), v.double(), turn, k_cache, v_cache, slots)
        return torch.cat((q, read(k_cache, v_cache)), dim=1)

    name = f"rope_kv_write {num_heads}/{kv_heads}/{dim}, KV {str(kv_dtype).removeprefix('torch.')}"
    tolerance = max(TOLERANCES[make.dtype], _KV_TOLERANCES.get(kv_dtype, 0.0))
    return Check(name, make.poisoned(len(positions) * num_heads * dim, launch), expected, tolerance)


def _copy_checks(make: Maker) -> Iterator[Check]:
    memory = make.normal(3, 2, 12, 16, 3, 64)
    sources, targets, blocks = (
        torch.tensor(ids, dtype=torch.int64).to(make.device) for ids in ((3, 3, 7, 9), (5, 7, 9, 3), (4, 11, 0))
    )

    def copied(copy: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
        changed = memory.clone()
        copy(changed, sources, targets)
        return changed

    yield Check("copy_blocks", lambda: copied(copy_blocks_triton), lambda: copied(copy_blocks))
    yield Check(
        "gather_blocks",
        make.poisoned(3 * memory[:, :, 0].numel(), lambda: gather_blocks_triton(memory, blocks)),
        lambda: gather_blocks(memory, blocks),
    )

    def scattered() -> Tensor:
        changed = torch.full_like(memory, torch.nan)
        scatter_blocks_triton(changed, gather_blocks_triton(memory, blocks), blocks)
        return changed

    def placed() -> Tensor:
        changed = torch.full_like(memory, torch.nan)
        for block in blocks.tolist():
            changed[:, :, block] = memory[:, :, block]
        return changed

    yield Check("scatter_blocks", scattered, placed)


def _matmul_checks(make: Maker) -> Iterator[Check]:
    toy = make.gpu.is_interpreted
    shapes = ((77, 100),) if toy else ((3072, 2048), (16384, 2048), (2048, 8192), (77, 1000))
    rows = (3, 17) if toy else (1, 8, 16, 17, 64, 100, 200)
    in_other_company = TOLERANCES[make.dtype] if toy else None
    for out_features, in_features in shapes:
        weight, bias = make.normal(out_features, in_features, std=0.02), make.normal(out_features)
        x = make.normal(rows[-1], in_features)
        name = f"{out_features} x {in_features}"
        for n in rows:
            yield Check(
                f"matmul {name}, {n} rows",
                make.poisoned(n * out_features, partial(matmul_triton, x[:n], weight, bias)),
                partial(matmul, x[:n].double(), weight.double(), bias.double()),
                TOLERANCES[make.dtype],
            )
        yield Check(
            f"matmul {name}, a row alone and among others",
            partial(matmul_triton, x[1:2], weight),
            partial(_second_row, partial(matmul_triton, x, weight)),
            in_other_company,
        )
        for quantization in WEIGHT_DTYPES:
            for is_invariant in (False, True):
                yield from _quantised_checks(make, x, weight, bias, rows, quantization, is_invariant)


def _quantised_checks(
    make: Maker, x: Tensor, weight: Tensor, bias: Tensor, rows: tuple[int, ...], quantization: str, is_invariant: bool
) -> Iterator[Check]:
    if x.device.type == "meta":
        numbers = torch.empty(weight.shape, dtype=WEIGHT_DTYPES[quantization], device=x.device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=x.device)
    else:
        linear = quantise_linear(weight, None, quantization, is_invariant)
        numbers, scales = linear.numbers, linear.scales
    name = f"{quantization} matmul {len(weight)} x {weight.shape[1]}{', invariant' if is_invariant else ''}"

    def product(x: Tensor) -> Tensor:
        return quantised_matmul_triton(x, numbers, scales, bias, is_invariant=is_invariant)

    for n in rows:
        yield Check(
            f"{name}, {n} rows",
            make.poisoned(n * len(weight), partial(product, x[:n])),
            partial(quantised_matmul, x[:n].double(), numbers, scales.double(), bias.double()),
            TOLERANCES[make.dtype],
        )
    if is_invariant:
        yield Check(
            f"{name}, a row alone and among others",
            partial(product, x[1:2]),
            partial(_second_row, partial(product, x)),
            TOLERANCES[make.dtype] if make.gpu.is_interpreted else None,
        )


def _second_row(compute: Callable[[], Tensor]) -> Tensor:
    return compute()[1:2]
