"""Paged attention against a plain float64 loop; unused slots of the cache hold NaN, which must not leak."""

import random

import pytest
import torch

from noria.kernels import paged_attention
from noria.kernels.paged_attention import AttentionRow, AttentionShape, plan_attention

HEAD_DIM = 8
NUM_BLOCKS = 64
# float32 decodes take the sparse products, the other dtypes and all longer rows the gathered keys and values
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


class Case:
    """Rows given as (cached tokens, queries, is padding), on shuffled blocks of a poisoned cache."""

    def __init__(self, rows, dtype, num_heads=6, num_kv_heads=2, block_size=4, window=None, seed=0):
        shuffled = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(shuffled)
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.num_kv_heads, self.window = num_heads, num_kv_heads, window
        shape = (NUM_BLOCKS + 1, block_size, num_kv_heads, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
        self.rows, self.keys, self.values = [], [], []
        num_tokens = 0
        for num_cached, num_queries, is_padding in rows:
            context_len = num_cached + (0 if is_padding else num_queries)
            table = [shuffled.pop() for _ in range(-(-context_len // block_size))]
            k, v = (torch.randn(context_len, num_kv_heads, HEAD_DIM, generator=generator).to(dtype) for _ in "kv")
            for position in range(context_len):
                slot = table[position // block_size], position % block_size
                self.k_cache[slot], self.v_cache[slot] = k[position], v[position]
            self.rows.append(AttentionRow(num_tokens, num_queries, num_cached, context_len, table))
            self.keys.append(k.double())
            self.values.append(v.double())
            num_tokens += num_queries
        self.q = torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)

    @property
    def shape(self):
        return AttentionShape(self.num_heads, self.num_kv_heads, HEAD_DIM, self.window)

    def attend(self):
        plan = plan_attention(self.rows, self.k_cache, self.shape)
        return plan.attend(self.q, self.k_cache, self.v_cache)

    def expected(self):
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for row, k, v in zip(self.rows, self.keys, self.values, strict=True):
            for index in range(row.num_queries):
                position = row.first_position + index
                begin = 0 if self.window is None else max(0, position - self.window + 1)
                end = min(position + 1, row.context_len)
                for head in range(self.num_heads if end > begin else 0):
                    kv_head = head * self.num_kv_heads // self.num_heads
                    q = self.q[row.query_start + index, head].double()
                    weights = (k[begin:end, kv_head] @ q * HEAD_DIM**-0.5).softmax(-1)
                    out[row.query_start + index, head] = weights @ v[begin:end, kv_head]
        return out

    def check(self):
        actual = self.attend()
        assert actual.shape == self.q.shape
        assert actual.dtype == self.q.dtype
        tolerance = TOLERANCES[self.q.dtype]
        torch.testing.assert_close(actual.double(), self.expected(), rtol=tolerance, atol=tolerance)


def decode(num_cached):
    return (num_cached, 1, False)


def chunk(num_cached, num_queries):
    return (num_cached, num_queries, False)


def padding(num_cached, num_queries=1):
    return (num_cached, num_queries, True)


@DTYPES
@pytest.mark.parametrize("num_cached", [0, 1, 2, 3, 4, 7, 8, 9])
def test_one_decode_around_block_edges(num_cached, dtype):
    Case([decode(num_cached)], dtype).check()


@DTYPES
@pytest.mark.parametrize("num_queries", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_cached", [0, 1, 3, 4, 5])
def test_one_chunk_around_block_edges(num_cached, num_queries, dtype):
    Case([chunk(num_cached, num_queries)], dtype).check()


MIXED = [decode(13), chunk(0, 7), decode(0), chunk(5, 2), padding(9), decode(31), chunk(16, 16), padding(0)]


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (5, 1), (8, 2)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_chunks_decodes_and_padding_in_one_batch(num_heads, num_kv_heads, block_size, dtype):
    rows = MIXED if block_size > 1 else MIXED[:4]
    Case(rows, dtype, num_heads, num_kv_heads, block_size).check()


@DTYPES
@pytest.mark.parametrize("window", [1, 3, 4, 5, 100])
def test_sliding_window(window, dtype):
    Case(MIXED, dtype, window=window).check()


@DTYPES
@pytest.mark.parametrize("window", [None, 6])
def test_a_chunk_of_several_tiles(window, dtype, monkeypatch):
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 4)
    Case([chunk(6, 11), decode(3), chunk(0, 4), chunk(9, 5)], dtype, window=window).check()


@DTYPES
def test_padding_sees_what_is_cached_and_nothing_else(dtype):
    Case([padding(5), padding(4, num_queries=3), padding(1)], dtype).check()
    Case([padding(5, num_queries=2), padding(12)], dtype, window=3).check()


@DTYPES
def test_padding_without_cached_tokens_is_zero_not_nan(dtype):
    case = Case([padding(0), padding(0, num_queries=2)], dtype)
    assert torch.equal(case.attend(), torch.zeros_like(case.q))


@pytest.mark.parametrize("row", [decode(300), chunk(40, 20), padding(30)])
def test_a_row_does_not_change_with_its_batch_mates(row):
    alone = Case([row], torch.float32, block_size=16).attend()
    # same seed, so that the first row has the same keys and values; only its queries are another draw
    beside = Case([row, decode(17), chunk(5, 9), padding(3)], torch.float32, block_size=16)
    beside.q[: len(alone)] = Case([row], torch.float32, block_size=16).q
    assert torch.equal(beside.attend()[: len(alone)], alone)


def test_a_plan_serves_many_layers():
    case = Case(MIXED, torch.float32)
    plan = plan_attention(case.rows, case.k_cache, case.shape)
    first = plan.attend(case.q, case.k_cache, case.v_cache)
    plan.attend(case.q * 50, case.k_cache * -3, case.v_cache)
    assert torch.equal(plan.attend(case.q, case.k_cache, case.v_cache), first)


def test_large_scores_do_not_overflow():
    case = Case([decode(20), chunk(3, 6)], torch.float32)
    case.q *= 1e4
    case.check()


def test_a_nan_row_stays_alone():
    case = Case([decode(6), decode(9), chunk(2, 4)], torch.float32)
    expected = case.attend()
    case.q[1] = torch.nan
    actual = case.attend()
    assert actual[1].isnan().all()
    assert torch.equal(actual[[0, 2, 3, 4, 5]], expected[[0, 2, 3, 4, 5]])
