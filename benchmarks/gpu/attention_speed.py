"""Attention alone: decodes as a share of the copy bandwidth, chunks of prompts as one of the matrix product's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpu.ceilings import Ceilings, measure_ceilings
from gpu.device import UNCACHED_BYTES, Gpu
from gpu.random_models import KV_BLOCK_SIZE
from gpu.rows import Row
from gpu.sizes import AttentionHeads, Sizes
from gpu.stages import Unit
from noria.kernels.kv_format import SCALE_BYTES, paged_kv
from noria.kernels.paged_attention import AttentionRow, AttentionShape
from noria.kernels.triton_attention import plan_attention_triton

STAGE = "attention"
DECODE_TARGET = 0.8
# the point that the target is stated for
TARGET_POINT = (64, 8192)
_MAX_LAYERS = 64
# of memory that stays free beside keys and values
_SPARE_BYTES = 6 * 2**30
# numbers of keys and values that all points have in common, so that they are made once
_MAX_ARENA_BYTES = 36 * 2**30


class AttentionSpeed:
    """Measures one after the other; keys and values are views of one tensor of random numbers."""

    def __init__(self, sizes: Sizes, gpu: Gpu) -> None:
        self.sizes, self.gpu = sizes, gpu
        # the interpreter computes products in bfloat16 wrongly
        self.dtype = torch.float16 if gpu.is_interpreted else torch.bfloat16
        self.ceilings: Ceilings | None = None
        self._arena: Tensor | None = None

    def units(self) -> Iterator[Unit]:
        yield Unit("ceilings", self._measure_ceilings, 4)
        for heads in self.sizes.heads:
            for point in self.sizes.decode_points:
                yield Unit(f"decode {heads.name} {point}", self._decode(heads, *point), 1.5)
        for heads in self.sizes.heads:
            for point in self.sizes.prefill_points:
                yield Unit(f"prefill {heads.name} {point}", self._prefill(heads, *point), 1.5)
        for heads in self.sizes.heads[:1]:
            for point in self.sizes.quantised_points:
                for kv_dtype in (torch.int8, torch.float8_e4m3fn):
                    yield Unit(f"decode {heads.name} {point} {kv_dtype}", self._decode(heads, *point, kv_dtype), 3)

    def _measure_ceilings(self) -> list[Row]:
        self.ceilings = measure_ceilings(self.sizes, self.gpu)
        return self.ceilings.rows(STAGE)

    def _ceilings(self) -> Ceilings:
        if self.ceilings is None:
            # of a process that went on behind a fault
            self.ceilings = measure_ceilings(self.sizes, self.gpu)
        return self.ceilings

    def _decode(
        self, heads: AttentionHeads, batch: int, context: int, kv_dtype: torch.dtype | None = None
    ) -> Callable[[], list[Row]]:
        def run() -> list[Row]:
            kind = "" if kv_dtype is None else f", {str(kv_dtype).removeprefix('torch.')} KV"
            name = f"decode attention {heads.name}, batch {batch}, context {context}{kind}"
            token_bytes = heads.num_kv_heads * heads.head_dim * self.dtype.itemsize
            if kv_dtype is not None:
                token_bytes = heads.num_kv_heads * (heads.head_dim + SCALE_BYTES)
            num_bytes = 2 * batch * context * token_bytes
            layers = self._layers(heads, batch * _num_blocks(context), num_bytes, kv_dtype)
            if not layers:
                return [Row(STAGE, name, note=f"{num_bytes / 2**30:.1f} GiB of keys and values do not fit")]
            ms = self._time(heads, layers, self._decode_rows(batch, context))
            rate = num_bytes / ms * 1e3
            share = rate / self._ceilings().copy_bytes_per_s
            is_target = (batch, context) == TARGET_POINT and kv_dtype is None
            note = f"{rate / 1e9:.0f} GB/s of keys and values, {1e3 * ms:.1f} us"
            details = {"ms": ms, "bytes": num_bytes, "layers": len(layers)}
            target = DECODE_TARGET if is_target else None
            return [Row(STAGE, name, share, "of copy", target, note=note, details=details)]

        return run

    def _prefill(self, heads: AttentionHeads, chunk: int, position: int) -> Callable[[], list[Row]]:
        def run() -> list[Row]:
            context = position + chunk
            seen = sum(range(position + 1, context + 1))
            flops = 4 * heads.num_heads * heads.head_dim * seen
            layers = self._layers(heads, _num_blocks(context), 0, None)
            table = self._tables(1, context)[0]
            ms = self._time(heads, layers, [AttentionRow(0, chunk, position, context, table)])
            rate = flops / ms * 1e3
            note = f"{rate / 1e12:.1f} TFLOP/s, {1e3 * ms:.1f} us"
            name = f"prefill attention {heads.name}, chunk {chunk} at {position}"
            share = rate / self._ceilings().flops_per_s
            return [Row(STAGE, name, share, "of product", note=note, details={"ms": ms, "flops": flops})]

        return run

    def _time(
        self, heads: AttentionHeads, layers: Sequence[tuple[Tensor, Tensor]], rows: Sequence[AttentionRow]
    ) -> float:
        shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        num_tokens = sum(row.num_queries for row in rows)
        q = self.gpu.random(num_tokens * heads.num_heads * heads.head_dim, self.dtype)
        q = q.view(num_tokens, heads.num_heads, heads.head_dim)
        plan = plan_attention_triton(rows, layers[0][0], shape, self.dtype)
        calls = [lambda layer=layer: plan.attend(q, *layer) for layer in layers]
        if len(calls) == 1:
            # a graph of one launch or two would measure the events as well
            calls = calls * 4
        return self.gpu.graph_ms(calls)

    def _layers(
        self, heads: AttentionHeads, num_blocks: int, num_bytes: int, kv_dtype: torch.dtype | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of caches: as many as have UNCACHED_BYTES together, one if num_bytes is 0, none if it does not fit."""
        if kv_dtype is not None:
            return [self._quantised(heads, num_blocks, kv_dtype)]
        shape = (num_blocks, KV_BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        size = torch.Size(shape).numel()
        arena = self._arena_of(2 * size)
        if arena is None:
            return []
        wanted = -(-UNCACHED_BYTES // (2 * size * arena.itemsize)) if num_bytes else 1
        num_layers = max(1, min(wanted, _MAX_LAYERS, len(arena) // (2 * size)))
        pieces = arena[: 2 * num_layers * size].view(num_layers, 2, *shape)
        return [(pieces[i, 0], pieces[i, 1]) for i in range(num_layers)]

    def _arena_of(self, num_numbers: int) -> Tensor | None:
        if self._arena is None:
            room = min(_MAX_ARENA_BYTES, self.gpu.free_bytes() - _SPARE_BYTES)
            largest = max(batch * context for batch, context in self.sizes.decode_points)
            chunks = max(chunk + position for chunk, position in self.sizes.prefill_points)
            wanted = max(
                2 * (max(largest, chunks) + KV_BLOCK_SIZE * 256) * heads.num_kv_heads * heads.head_dim
                for heads in self.sizes.heads
            )
            limit = wanted if self.gpu.is_interpreted else room // self.dtype.itemsize
            self._arena = self.gpu.random(min(max(wanted, UNCACHED_BYTES), limit), self.dtype)
        return self._arena if num_numbers <= len(self._arena) else None

    def _quantised(self, heads: AttentionHeads, num_blocks: int, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        width = KV_BLOCK_SIZE * heads.num_kv_heads * (heads.head_dim + SCALE_BYTES)
        caches = []
        for _ in "kv":
            cache = torch.empty(num_blocks, width, dtype=kv_dtype, device=self.gpu.device)
            kv = paged_kv(cache, heads.num_kv_heads, heads.head_dim)
            for piece in kv.numbers.split(4096):
                numbers = torch.randn(piece.shape, device=self.gpu.device) * 30
                piece.copy_(numbers.clamp_(-127, 127).round_() if kv_dtype == torch.int8 else numbers.clamp_(-448, 448))
            assert kv.scales is not None, "a quantised cache has scales"
            kv.scales.fill_(0.03)
            caches.append(cache)
        return caches[0], caches[1]

    def _decode_rows(self, batch: int, context: int) -> list[AttentionRow]:
        tables = self._tables(batch, context)
        return [AttentionRow(row, 1, context - 1, context, table) for row, table in enumerate(tables)]

    def _tables(self, batch: int, context: int) -> list[list[int]]:
        """Blocks in random order, as they lie after hours of serving."""
        generator = torch.Generator().manual_seed(1)
        num_blocks = _num_blocks(context)
        return torch.randperm(batch * num_blocks, generator=generator).view(batch, num_blocks).tolist()


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // KV_BLOCK_SIZE)


def dry_run(heads: AttentionHeads, dtype: torch.dtype, kv_dtype: torch.dtype | None, sizes: Sizes) -> None:
    """Launches what is timed, on tensors of the device "meta"."""
    meta = torch.device("meta")
    shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim)
    if kv_dtype is None:
        cache = torch.empty(64, KV_BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype, device=meta)
    else:
        width = KV_BLOCK_SIZE * heads.num_kv_heads * (heads.head_dim + SCALE_BYTES)
        cache = torch.empty(64, width, dtype=kv_dtype, device=meta)
    rows_of = [
        [AttentionRow(i, 1, 15, 16, (0,)) for i in range(batch)] for batch in {b for b, _ in sizes.decode_points}
    ]
    rows_of.append([AttentionRow(0, 32, 0, 32, (0, 1))])
    for rows in rows_of:
        num_tokens = sum(row.num_queries for row in rows)
        q = torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype, device=meta)
        plan_attention_triton(rows, cache, shape, dtype).attend(q, cache, cache)
