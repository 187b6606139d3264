"""Rotary position embedding (Su et al. 2021) of queries and keys, and the write of keys and values into the cache.

Halves of a head are the pair that is turned (GPT-NeoX's and Hugging Face's convention):

    y[:half] = x[:half] * cos - x[half:] * sin,    y[half:] = x[half:] * cos + x[:half] * sin
    angle[token, i] = position[token] * inv_freq[i],    half = head_dim / 2

Written as y = x * cos + swap_halves(x) * signed_sin, which is three operations instead of nine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Of one step's tokens, shared by all layers; both [tokens, 1, head_dim], the first half of signed_sin negated."""

    cos: Tensor
    signed_sin: Tensor


def rotation(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Rotation:
    """positions [tokens] int64, inv_freq [head_dim / 2] float32. Angles are float32 whatever `dtype` is."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype))


def rope_kv_write(
    qk: Tensor, v: Tensor, turn: Rotation, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Turns queries and keys, writes keys and values to their slots, returns the queries [tokens, num_heads, head_dim].

    qk [tokens, num_heads + num_kv_heads, head_dim], queries first; v [tokens, num_kv_heads, head_dim].
    k_cache, v_cache [blocks, block_size, num_kv_heads, head_dim], contiguous.
    slot_mapping [tokens] int64: block * block_size + offset. Several tokens may share a slot that is never read.
    """
    num_kv_heads, head_dim = v.shape[1:]
    turned = torch.addcmul(qk * turn.cos, qk.roll(head_dim // 2, dims=-1), turn.signed_sin)
    q, k = turned.split((turned.shape[1] - num_kv_heads, num_kv_heads), dim=1)
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, v)
    return q
