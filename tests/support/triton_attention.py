"""Rows of a step on a shuffled, poisoned cache, and their attention: by the Triton kernels, and by a plain loop."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from noria.kernels.kv_format import SCALE_BYTES, dequantised, is_quantised, paged_kv, write_tokens
from noria.kernels.paged_attention import AttentionRow, AttentionShape
from noria.kernels.paged_decode import DecodeRows, paged_decode
from noria.kernels.paged_prefill import PrefillTiles, paged_prefill, queries_per_tile
from noria.kernels.split_states import Workspace
from noria.kernels.triton_attention import TritonAttentionPlan, decode_rows, plan_attention_triton
from noria.kernels.upload import upload

CPU = torch.device("cpu")
# of a few roundings; in 16 bits the weights are rounded, too
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3}


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """tl.dot adds up in the order of the inner dimension, each row of a tile alike.

    On a GPU a row of a product does not depend on where in the tile it stands. In the interpreter tl.dot is numpy's
    matmul, whose library takes other instructions for rows at the edge: that alone would change bits.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        total = d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


class Row(NamedTuple):
    """seed: of its keys, values and queries, which at a position are the same however many others there are."""

    num_cached: int
    num_queries: int = 1
    is_padding: bool = False
    seed: int = 0

    @property
    def context_len(self) -> int:
        return self.num_cached + (0 if self.is_padding else self.num_queries)


class Case:
    """Rows on shuffled blocks of a cache, of which the slots that no row has hold NaN."""

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        window: int | None = None,
        soft_cap: float = 0.0,
        magnitude: float = 1.0,
        block_order: int = 0,
    ) -> None:
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, window, soft_cap)
        self.dtype, kv_dtype = dtype, kv_dtype or dtype
        num_blocks = sum(-(-row.context_len // block_size) for row in rows) + 3
        blocks = list(range(num_blocks))
        random.Random(block_order).shuffle(blocks)
        self.k_cache, self.v_cache = (
            poisoned_cache(num_blocks, block_size, num_kv_heads, head_dim, kv_dtype) for _ in "kv"
        )
        self.rows: list[AttentionRow] = []
        queries: list[Tensor] = []
        start = 0
        for row in rows:
            k, v, q = (
                torch.randn(n, heads, head_dim, generator=torch.Generator().manual_seed(3 * row.seed + which))
                for which, (n, heads) in enumerate(
                    [(row.context_len, num_kv_heads)] * 2 + [(row.num_cached + row.num_queries, num_heads)]
                )
            )
            table = [blocks.pop() for _ in range(-(-row.context_len // block_size))]
            self.rows.append(AttentionRow(start, row.num_queries, row.num_cached, row.context_len, table))
            positions = torch.arange(row.context_len)
            slots = (
                torch.tensor(table, dtype=torch.int64)[positions // block_size] * block_size + positions % block_size
            )
            for x, cache in ((k, self.k_cache), (v * magnitude, self.v_cache)):
                write_tokens(x.to(dtype), cache, slots)
            queries.append(q[row.num_cached :].to(dtype))
            start += row.num_queries
        self.q = torch.cat(queries)

    def plan(self, is_deterministic: bool = False) -> TritonAttentionPlan:
        plan = plan_attention_triton(self.rows, self.k_cache, self.shape, self.dtype, is_deterministic)
        assert isinstance(plan, TritonAttentionPlan)
        return plan

    def attend(self, is_deterministic: bool = False) -> Tensor:
        """As the plan does, into an out and a workspace full of NaN."""
        plan = self.plan(is_deterministic)
        out = self.empty_out()
        if plan.prefills is not None:
            self._prefill(out, plan.prefills, is_deterministic)
        if plan.decodes is not None:
            self._decode(out, plan.decodes, is_deterministic)
        return out

    def decode(self, is_deterministic: bool = False) -> Tensor:
        """All queries, whatever their rows, each as a row of its own."""
        rows = [
            AttentionRow(row.query_start + index, 1, row.first_position + index, row.context_len, row.block_table)
            for row in self.rows
            for index in range(row.num_queries)
        ]
        arrays = decode_rows(rows, len(rows), self.shape.sliding_window)
        out = self.empty_out()
        self._decode(out, DecodeRows(*upload(arrays, CPU)), is_deterministic)
        return out

    def prefill(self, is_deterministic: bool = False) -> Tensor:
        """All rows, those of one query among them."""
        per_tile = queries_per_tile(self.dtype, self.k_cache.dtype, self.shape, is_deterministic)
        tiles = [(i, first) for i, row in enumerate(self.rows) for first in range(0, row.num_queries, per_tile)]
        lengths = [len(row.block_table) for row in self.rows]
        columns = {
            "query_starts": [row.query_start for row in self.rows],
            "num_queries": [row.num_queries for row in self.rows],
            "first_positions": [row.first_position for row in self.rows],
            "context_lens": [row.context_len for row in self.rows],
            "table_starts": [sum(lengths[:i]) for i in range(len(lengths))],
            "block_ids": [block for row in self.rows for block in row.block_table],
            "tile_rows": [row for row, _ in tiles],
            "tile_queries": [first for _, first in tiles],
        }
        arrays = upload([np.array(column, dtype=np.int32) for column in columns.values()], CPU)
        out = self.empty_out()
        self._prefill(out, PrefillTiles(**dict(zip(columns, arrays, strict=True))), is_deterministic)
        return out

    def check(self, actual: Tensor) -> None:
        assert actual.shape == self.q.shape
        assert actual.dtype == self.dtype
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(actual.double(), self.expected(), rtol=tolerance, atol=tolerance)

    def empty_out(self) -> Tensor:
        return torch.full(self.q.shape, torch.nan, dtype=self.dtype)

    def _decode(self, out: Tensor, rows: DecodeRows, is_deterministic: bool) -> None:
        num_units = max(1, int(rows.unit_starts[-1]))
        num_heads, num_kv_heads, head_dim, _, soft_cap = self.shape
        dim = 1 << (head_dim - 1).bit_length()
        workspace = Workspace(*(torch.full((num_units, num_heads, n), torch.nan) for n in (dim, 2)))
        paged_decode(out, self.q, self.k_cache, self.v_cache, rows, workspace, num_kv_heads, soft_cap, is_deterministic)

    def _prefill(self, out: Tensor, tiles: PrefillTiles, is_deterministic: bool) -> None:
        _, num_kv_heads, _, window, soft_cap = self.shape
        paged_prefill(out, self.q, self.k_cache, self.v_cache, tiles, num_kv_heads, window, soft_cap, is_deterministic)

    def expected(self) -> Tensor:
        """float64, a query and a head at a time."""
        num_heads, num_kv_heads, head_dim, window, soft_cap = self.shape
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        k, v = (
            dequantised(paged_kv(cache, num_kv_heads, head_dim), torch.float64)
            for cache in (self.k_cache, self.v_cache)
        )
        for row in self.rows:
            # a block after the other, each token of it after the other
            keys, values = (torch.cat([x[block] for block in row.block_table] or [x[0, :0]]) for x in (k, v))
            for index in range(row.num_queries):
                position, token = row.first_position + index, row.query_start + index
                begin = 0 if window is None else max(0, position - window + 1)
                end = min(position + 1, row.context_len)
                for head in range(num_heads if end > begin else 0):
                    kv_head = head * num_kv_heads // num_heads
                    scores = keys[begin:end, kv_head] @ self.q[token, head].double() / head_dim**0.5
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    out[token, head] = scores.softmax(-1) @ values[begin:end, kv_head]
        return out


def poisoned_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> Tensor:
    """Every byte 255: NaN as a float of any size, and so is the scale of an int8 number."""
    if is_quantised(kv_dtype):
        shape: tuple[int, ...] = (num_blocks, block_size * num_kv_heads * (head_dim + SCALE_BYTES))
    else:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return torch.full((*shape[:-1], shape[-1] * kv_dtype.itemsize), 255, dtype=torch.uint8).view(kv_dtype)
