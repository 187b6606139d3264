"""The attention kernels against their definition in float64, and against themselves in other company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu.checks import DTYPE_NAMES, TOLERANCES, Check
from gpu.device import Gpu
from noria.kernels.attention_tiles import padded_dim
from noria.kernels.kv_format import SCALE_BYTES, is_quantised, write_tokens
from noria.kernels.paged_attention import AttentionRow, AttentionShape
from noria.kernels.paged_decode import DecodeRows, paged_decode, paged_decode_reference
from noria.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from noria.kernels.split_states import Workspace
from noria.kernels.triton_attention import TritonAttentionPlan, decode_rows, plan_attention_triton
from noria.kernels.upload import upload

# (cached tokens, queries): decodes around pages and splits, a row that sees nothing, and chunks of prompts
ROWS = (
    *((context - 1, 1) for context in (1, 2, 15, 16, 17, 63, 255, 256, 257, 513, 1000, 2500)),
    *((0, 37), (16, 130), (255, 2), (100, 3), (0, 300)),
)
TOY_ROWS = ((16, 1), (258, 1), (0, 5), (14, 3))


@dataclass(frozen=True)
class Variant:
    """What a case is made of. is_deterministic: decodes and chunks then give the same bits."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    is_deterministic: bool = False

    @property
    def name(self) -> str:
        kv = "" if self.kv_dtype is None else f", KV {str(self.kv_dtype).removeprefix('torch.')}"
        window = f", window {self.window}" if self.window else ""
        cap = ", soft cap" if self.soft_cap else ""
        mode = ", deterministic" if self.is_deterministic else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{DTYPE_NAMES[self.dtype]} {heads}, page {self.block_size}{kv}{window}{cap}{mode}"

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.window, self.soft_cap)


_PLAIN = (
    Variant(32, 8, 128),
    Variant(9, 3, 64),
    Variant(8, 8, 80, block_size=32),
    Variant(24, 8, 96, block_size=64),
    Variant(16, 2, 256, block_size=128, soft_cap=50.0),
    Variant(16, 1, 128, window=70),
)
_QUANTISED = (Variant(32, 8, 128), Variant(12, 4, 64, window=100, soft_cap=30.0))
_DETERMINISTIC = (Variant(32, 8, 128), Variant(32, 8, 64), Variant(16, 2, 256, block_size=128, soft_cap=50.0))


def variants(dtype: torch.dtype, is_toy: bool) -> list[Variant]:
    plain, quantised = (_PLAIN[1:2], _QUANTISED[1:]) if is_toy else (_PLAIN, _QUANTISED)
    found = list(plain)
    if not is_toy:
        found += [replace(variant, is_deterministic=True) for variant in _DETERMINISTIC]
    if dtype != torch.float32:
        for kv_dtype in (torch.int8, torch.float8_e4m3fn):
            found += [replace(variant, kv_dtype=kv_dtype) for variant in quantised]
        if not is_toy:
            found.append(replace(_QUANTISED[0], kv_dtype=torch.int8, is_deterministic=True))
    return [replace(variant, dtype=dtype) for variant in found]


class _Case:
    """Rows on shuffled blocks of caches, every other byte of which is 255, NaN. Made on the CPU, from a seed."""

    def __init__(self, variant: Variant, rows: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.variant = variant
        generator = torch.Generator().manual_seed(3)
        block_size, kv_heads, dim = variant.block_size, variant.num_kv_heads, variant.head_dim
        contexts = [cached + queries for cached, queries in rows]
        num_blocks = [-(-context // block_size) for context in contexts]
        blocks = torch.randperm(sum(num_blocks) + 3, generator=generator)
        caches = [_poisoned_cache(len(blocks), variant) for _ in "kv"]
        self.rows: list[AttentionRow] = []
        tables = blocks[: sum(num_blocks)].split(num_blocks)
        start = 0
        for (cached, queries), context, table in zip(rows, contexts, tables, strict=True):
            positions = torch.arange(context)
            slots = table[positions // block_size] * block_size + positions % block_size
            for cache in caches:
                write_tokens(torch.randn(context, kv_heads, dim, generator=generator).to(variant.dtype), cache, slots)
            self.rows.append(AttentionRow(start, queries, cached, context, table.tolist()))
            start += queries
        # a padding row without a key
        self.rows.append(AttentionRow(start, 1, 0, 0, ()))
        q = torch.randn(start + 1, variant.num_heads, dim, generator=generator)
        self.q = q.to(variant.dtype).to(device)
        self.k_cache, self.v_cache = (cache.to(device) for cache in caches)

    def plan(self, rows: Sequence[AttentionRow]) -> TritonAttentionPlan:
        variant = self.variant
        plan = plan_attention_triton(rows, self.k_cache, variant.shape, variant.dtype, variant.is_deterministic)
        assert isinstance(plan, TritonAttentionPlan)
        return plan

    def attend(self, plan: TritonAttentionPlan, token: int | None = None) -> Tensor:
        """As the plan does, into an out and a workspace full of NaN. token: that one alone, [num_heads, head_dim]."""
        out = self._nan(self.q.shape, self.variant.dtype)
        if plan.prefills is not None:
            _, kv_heads, _, window, cap = plan.shape
            arguments = out, self.q, self.k_cache, self.v_cache, plan.prefills, kv_heads, window, cap
            paged_prefill(*arguments, self.variant.is_deterministic)
        if plan.decodes is not None:
            assert plan.workspace is not None
            self._decode(out, plan.decodes, len(plan.workspace.acc))
        return out if token is None else out[token]

    def decode_all(self) -> Tensor:
        """Every query as a row of its own."""
        rows = [
            AttentionRow(row.query_start + i, 1, row.first_position + i, row.context_len, row.block_table)
            for row in self.rows
            for i in range(row.num_queries)
        ]
        arrays = decode_rows(rows, len(rows), self.variant.window)
        out = self._nan(self.q.shape, self.variant.dtype)
        num_units = int(arrays[DecodeRows._fields.index("unit_starts")][-1])
        self._decode(out, DecodeRows(*upload(arrays, self.q.device)), num_units)
        return out

    def expected(self, plan: TritonAttentionPlan) -> Tensor:
        q, kv_heads, cap = self.q.double(), self.variant.num_kv_heads, self.variant.soft_cap
        out = torch.zeros_like(q)
        if plan.prefills is not None:
            arguments = q, self.k_cache, self.v_cache, plan.prefills, kv_heads, self.variant.window, cap
            out += paged_prefill_reference(*arguments)
        if plan.decodes is not None:
            found = paged_decode_reference(q, self.k_cache, self.v_cache, plan.decodes, kv_heads, cap)
            out[plan.decodes.query_indices.long()] = found
        return out

    def _decode(self, out: Tensor, rows: DecodeRows, num_units: int) -> None:
        heads, kv_heads, dim, _, cap = self.variant.shape
        sizes = (padded_dim(dim), 2)
        workspace = Workspace(*(self._nan((max(1, num_units), heads, n), torch.float32) for n in sizes))
        arguments = out, self.q, self.k_cache, self.v_cache, rows, workspace, kv_heads, cap
        paged_decode(*arguments, self.variant.is_deterministic)

    def _nan(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=self.q.device)


def attention_checks(variant: Variant, gpu: Gpu, device: torch.device | None = None) -> Iterator[Check]:
    """device: meta, to compile; else the GPU's."""
    case = _Case(variant, TOY_ROWS if gpu.is_interpreted else ROWS, device or gpu.device)
    plan = case.plan(case.rows)
    tolerance = TOLERANCES[variant.dtype]
    yield Check("decodes and chunks", lambda: case.attend(plan), lambda: case.expected(plan), tolerance)
    decodes = [row for row in case.rows if row.num_queries == 1]
    # the interpreter's products are numpy's, whose rows do not all round alike
    in_other_company = tolerance if gpu.is_interpreted else None
    for row in decodes[-2 if gpu.is_interpreted else -3 : -1]:
        alone, token = case.plan([row]), row.query_start
        yield Check(
            f"{row.context_len} keys, alone and among others",
            partial(case.attend, alone, token),
            partial(case.attend, plan, token),
            in_other_company,
        )
    if variant.is_deterministic:
        yield Check("chunks as decodes", case.decode_all, lambda: case.attend(plan), in_other_company)


def distant_blocks_check(gpu: Gpu) -> Check:
    """Blocks whose offset in the cache is beyond 2^31 numbers, and beyond 2^32 bytes."""
    heads, kv_heads, dim, block_size = 8, 8, 128, 16
    num_blocks = 2**31 // (block_size * kv_heads * dim) + 100
    caches = [torch.empty(num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=gpu.device) for _ in "kv"]
    tables = [[num_blocks - 1, 3, num_blocks - 7], [0, num_blocks - 2]]
    q = gpu.random(3 * heads * dim).view(3, heads, dim)
    for cache in caches:
        for block in (*tables[0], *tables[1]):
            cache[block] = gpu.random(cache[0].numel()).view(cache[0].shape)
    rows = [AttentionRow(0, 1, 40, 41, tables[0]), AttentionRow(1, 2, 20, 22, tables[1])]
    plan = plan_attention_triton(rows, caches[0], AttentionShape(heads, kv_heads, dim), torch.bfloat16)

    def expected() -> Tensor:
        outs = []
        for row in rows:
            keys, values = (cache[row.block_table].double().flatten(0, 1) for cache in caches)
            for i in range(row.num_queries):
                end = row.first_position + i + 1
                scores = torch.einsum("hd,jhd->hj", q[row.query_start + i].double(), keys[:end]) / dim**0.5
                outs.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), values[:end]))
        return torch.stack(outs)

    return Check("blocks beyond 2^31 numbers", lambda: plan.attend(q, *caches), expected, TOLERANCES[torch.bfloat16])


def _poisoned_cache(num_blocks: int, variant: Variant) -> Tensor:
    kv_dtype = variant.kv_dtype or variant.dtype
    kv_heads, dim, block_size = variant.num_kv_heads, variant.head_dim, variant.block_size
    if is_quantised(kv_dtype):
        shape: tuple[int, ...] = (num_blocks, block_size * kv_heads * (dim + SCALE_BYTES))
    else:
        shape = (num_blocks, block_size, kv_heads, dim)
    num_bytes = int(np.prod(shape)) * kv_dtype.itemsize
    return torch.full((num_bytes,), 255, dtype=torch.uint8).view(kv_dtype).view(shape)
