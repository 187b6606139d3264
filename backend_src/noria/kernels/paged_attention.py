"""Causal grouped-query attention over keys and values in paged blocks, for prefill chunks and decodes in one batch.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h'] / sqrt(head_dim)) v[j, h'],    h' = h * num_kv_heads // num_heads

    q, out [tokens, num_heads, head_dim];  k_cache, v_cache [blocks, block_size, num_kv_heads, head_dim], contiguous
    position j of a sequence lies in block block_table[j // block_size], offset j % block_size
    a token at position p sees the positions j <= p of its sequence, with a sliding window those of them > p - window

What depends only on the step is worked out once, in `plan_attention`, and shared by all layers. Two ways to compute:

- `_SingleQueries`, decodes in float32 on a CPU: the block tables are the sparsity pattern of one matrix of all scores,
  which two sparse products read keys and values through in place. Nothing is gathered or padded.
  SmolLM2-135M, 8 rows, 300 keys each, 30 layers, 2 cores: 10 ms, where gathering keys and values for SDPA takes 25 ms.
- `_GatheredRow`, everything else: the keys and values of one sequence are gathered, then torch's tiled attention runs
  on QUERY_TILE queries at a time, so that scores and masks stay small however long a prompt is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence's queries: batch tokens [query_start, query_start + num_queries), the first at `first_position`.

    context_len: positions [0, context_len) may be read. Less than first_position + num_queries for a padding row,
        whose own keys are not written; a query that sees no position at all gets zeros.
    block_table: ids of the blocks of positions [0, context_len); longer is fine.
    """

    query_start: int
    num_queries: int
    first_position: int
    context_len: int
    block_table: Sequence[int]


class AttentionShape(NamedTuple):
    """What is the same for all layers of a model. sliding_window: None is all positions before; soft_cap: 0 is none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float = 0.0


class AttentionPlan(Protocol):
    """One step's attention, ready to be computed for one layer after the other."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries of one row that are computed together, and the positions [key_begin, key_end) that any of them sees."""

    query_start: int
    num_queries: int
    key_begin: int
    key_end: int


def plan_attention(rows: Sequence[AttentionRow], k_cache: Tensor, shape: AttentionShape) -> AttentionPlan:
    """Plans for caches of the shape, dtype and device of `k_cache`; the rows' tokens cover the batch without a gap.

    Raises ValueError for a soft cap, which torch's operators do not know.
    """
    if shape.soft_cap:
        raise ValueError("soft_cap must be 0 with torch's operators")
    sliding_window = shape.sliding_window
    block_size = k_cache.shape[1]
    # torch's sampled product knows float32 and float64, and only its CPU kernel takes the pattern in place
    is_sparse = k_cache.device.type == "cpu" and k_cache.dtype == torch.float32
    singles: list[tuple[AttentionRow, _Tile]] = []
    gathered: list[_GatheredRow] = []
    for row in rows:
        tiles = tuple(_tiles(row, sliding_window))
        if is_sparse and all(tile.num_queries == 1 for tile in tiles):
            singles.extend((row, tile) for tile in tiles)
        else:
            gathered.append(_GatheredRow.build(row.block_table, tiles, block_size, k_cache.device))
    mask = _build_mask([tile for row in gathered for tile in row.tiles], sliding_window, k_cache)
    single_queries = _SingleQueries.build(singles, k_cache, shape.num_heads) if singles else None
    return TorchAttentionPlan(single_queries, tuple(gathered), mask)


def _tiles(row: AttentionRow, sliding_window: int | None) -> Iterator[_Tile]:
    # a padding row's queries see the same keys whatever their positions are, which the mask cannot express
    is_padding = row.context_len < row.first_position + row.num_queries
    step = 1 if is_padding else QUERY_TILE
    for offset in range(0, row.num_queries, step):
        num_queries = min(step, row.num_queries - offset)
        position = row.first_position + offset
        key_end = min(position + num_queries, row.context_len)
        key_begin = 0 if sliding_window is None else min(max(0, position - sliding_window + 1), key_end)
        yield _Tile(row.query_start + offset, num_queries, key_begin, key_end)


def _build_mask(tiles: Sequence[_Tile], sliding_window: int | None, like: Tensor) -> Tensor | None:
    """One additive mask whose lower right corner serves every tile of several queries; None if there is no such tile.

    A tile's last query stands at its last key, so that whether a query sees a key depends only on how far both are
    from the corner. [queries of the tallest tile, keys of the widest]:

                       keys ->          . seen   x not seen
        queries   . . . . . . x x
           |      . . . . . . . x
           v      . . . . . . . .   <- the corner
    """
    shapes = [(tile.num_queries, tile.key_end - tile.key_begin) for tile in tiles if tile.num_queries > 1]
    if not shapes:
        return None
    num_queries, num_keys = (max(sizes) for sizes in zip(*shapes, strict=True))
    query = torch.arange(-num_queries, 0, device=like.device)[:, None]
    distance = query - torch.arange(-num_keys, 0, device=like.device)
    is_hidden = distance < 0
    if sliding_window is not None:
        is_hidden |= distance >= sliding_window
    return torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(is_hidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """See AttentionPlan."""

    singles: _SingleQueries | None
    gathered: tuple[_GatheredRow, ...]
    mask: Tensor | None

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        if self.singles is not None and not self.gathered:
            return self.singles.attend(q, k_cache, v_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row in self.gathered:
            row.attend(q, k_cache, v_cache, self.mask, out)
        if self.singles is not None:
            indices = self.singles.query_indices
            out.index_copy_(0, indices, self.singles.attend(q.index_select(0, indices), k_cache, v_cache))
        return out


@dataclass(frozen=True, slots=True)
class _GatheredRow:
    """A sequence whose keys and values are copied together: `blocks` hold the positions from first_position onwards."""

    tiles: tuple[_Tile, ...]
    blocks: Tensor
    first_position: int

    @classmethod
    def build(
        cls, block_table: Sequence[int], tiles: tuple[_Tile, ...], block_size: int, device: torch.device
    ) -> _GatheredRow:
        begin, end = tiles[0].key_begin // block_size, -(-tiles[-1].key_end // block_size)
        return cls(tiles, torch.tensor(block_table[begin:end], dtype=torch.int64, device=device), begin * block_size)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor | None, out: Tensor) -> None:
        k, v = (cache.index_select(0, self.blocks).flatten(0, 1) for cache in (k_cache, v_cache))
        for tile in self.tiles:
            queries = slice(tile.query_start, tile.query_start + tile.num_queries)
            keys = slice(tile.key_begin - self.first_position, tile.key_end - self.first_position)
            tile_mask = None
            if tile.num_queries > 1:
                assert mask is not None
                tile_mask = mask[-tile.num_queries :, tile.key_begin - tile.key_end :]
            out[queries] = _attend_dense(q[queries], k[keys], v[keys], tile_mask)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [queries, num_heads, head_dim]; k, v [keys, num_kv_heads, head_dim]; mask [queries, keys], additive."""
    num_kv_heads, head_dim = k.shape[1:]
    # key-value heads are the batch, so that the heads of one group share k and v without a copy
    grouped = q.reshape(len(q), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
    return functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _SingleQueries:
    """Queries of one token each, as rows of sparse matrices over the whole cache.

    Matrix row i * num_heads + h is head h of query i; column slot * num_kv_heads + h' is a key or value of the cache.
    query_indices [queries]: tokens of the batch.
    scores: CSR; computed anew by each layer, in place.  columns, weights: its column indices, softmaxed values.
    row_starts: where the matrix rows begin in these.
    views: scores and weights of each query that sees a key, [num_heads, keys].
    """

    query_indices: Tensor
    scores: Tensor
    columns: Tensor
    weights: Tensor
    row_starts: Tensor
    views: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def build(cls, queries: Sequence[tuple[AttentionRow, _Tile]], k_cache: Tensor, num_heads: int) -> _SingleQueries:
        num_blocks, block_size, num_kv_heads, _ = k_cache.shape
        kv_head = np.arange(num_heads)[:, None] // (num_heads // num_kv_heads)
        columns = torch.from_numpy(
            np.concatenate(
                [(_slots(row.block_table, tile, block_size) * num_kv_heads + kv_head).ravel() for row, tile in queries]
            )
        )
        num_keys = np.array([tile.key_end - tile.key_begin for _, tile in queries])
        row_starts = torch.from_numpy(np.concatenate(([0], np.repeat(num_keys, num_heads).cumsum())))
        scores = _zeros_csr(row_starts, columns, num_blocks * block_size * num_kv_heads)
        weights = torch.empty_like(scores.values())
        sizes = (num_keys * num_heads).tolist()
        return cls(
            query_indices=torch.tensor([tile.query_start for _, tile in queries], dtype=torch.int64),
            scores=scores,
            columns=columns,
            weights=weights,
            row_starts=row_starts[:-1],
            views=tuple(
                (of_scores.view(num_heads, -1), of_weights.view(num_heads, -1))
                for of_scores, of_weights in zip(scores.values().split(sizes), weights.split(sizes), strict=True)
                if len(of_scores) > 0
            ),
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """q [queries, num_heads, head_dim], and so is the answer."""
        if not self.views:
            return torch.zeros_like(q)
        head_dim = q.shape[-1]
        keys, values = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
        flat_q = q.reshape(-1, head_dim)
        torch.sparse.sampled_addmm(self.scores, flat_q, keys.t(), beta=0.0, alpha=head_dim**-0.5, out=self.scores)
        for scores, weights in self.views:
            torch.softmax(scores, dim=-1, out=weights)
        # a bag is a matrix row: the sum of the values at its columns, each times its weight
        out = functional.embedding_bag(
            self.columns, values, self.row_starts, mode="sum", per_sample_weights=self.weights
        )
        return out.view(q.shape)


def _slots(block_table: Sequence[int], tile: _Tile, block_size: int) -> np.ndarray:
    """Slots of the positions [key_begin, key_end)."""
    first_block = tile.key_begin // block_size
    blocks = np.array(block_table[first_block : -(-tile.key_end // block_size)], dtype=np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
    return slots[tile.key_begin - first_block * block_size : tile.key_end - first_block * block_size]


def _zeros_csr(row_starts: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    shape = (len(row_starts) - 1, num_columns)
    with warnings.catch_warnings():
        # torch says once that its sparse CSR tensors are in beta
        warnings.filterwarnings("ignore", message="Sparse CSR")
        return torch.sparse_csr_tensor(row_starts, columns, torch.zeros(len(columns)), shape, check_invariants=False)
