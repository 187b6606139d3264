"""Paged attention in the Triton language, in the interpreter, against a plain float64 loop.

Unused slots of a cache, out and workspace hold NaN, which must not leak. Not in bfloat16: the interpreter computes its
products wrongly.
"""

import pytest
import torch

from noria.kernels.attention_tiles import HEAD_DIMS, SPLIT_KEYS
from noria.kernels.paged_attention import AttentionRow, plan_attention
from noria.kernels.paged_decode import paged_decode, paged_decode_reference
from noria.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from support.quick_interpreter import quick_interpreter  # noqa: F401
from support.triton_attention import TOLERANCES, Case, Row

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
QUANTISED = pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
DETERMINISTIC = pytest.mark.parametrize("is_deterministic", [False, True], ids=["ordinary", "deterministic"])
PAGE = 16
# keys that a decode sees, its own among them
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, SPLIT_KEYS - 1, SPLIT_KEYS, SPLIT_KEYS + 1, 5 * SPLIT_KEYS + 60]
DECODES = [Row(0, is_padding=True), *(Row(length - 1, seed=length) for length in LENGTHS)]
CHUNKS = [
    *(
        Row(cached, queries, seed=cached)
        for cached, queries in [(0, 2), (1, PAGE - 1), (15, PAGE), (16, PAGE + 1), (17, 3)]
    ),
    *(Row(cached, queries, seed=cached) for cached, queries in [(SPLIT_KEYS - 2, 4), (SPLIT_KEYS, 2), (0, 48)]),
]
PADDING = [
    Row(0, is_padding=True),
    Row(0, 3, is_padding=True),
    Row(9, is_padding=True, seed=1),
    Row(20, 7, is_padding=True, seed=2),
    # a whole tile of keys but for one, which is no key
    Row(31, 2, is_padding=True, seed=3),
    Row(127, 2, is_padding=True, seed=4),
]
MIXED = [
    Row(13, seed=1),
    Row(0, 7, seed=2),
    PADDING[3],
    Row(0, seed=3),
    Row(5, 2, seed=4),
    PADDING[1],
    Row(270, seed=5),
]
# of the interpreter, about a loop whose bounds are tensors
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


@DTYPES
@DETERMINISTIC
def test_decodes_around_edges_of_pages_and_splits(is_deterministic, dtype):
    case = Case(DECODES, dtype, num_heads=3, num_kv_heads=1)
    case.check(case.attend(is_deterministic))


@DTYPES
@DETERMINISTIC
def test_chunks_around_edges_of_pages_and_splits(is_deterministic, dtype):
    case = Case(CHUNKS, dtype, num_heads=3, num_kv_heads=1)
    case.check(case.attend(is_deterministic))


@DTYPES
def test_each_kernel_computes_any_row(dtype):
    case = Case(MIXED, dtype, num_heads=3, num_kv_heads=1)
    case.check(case.decode())
    case.check(case.prefill())


@pytest.mark.slow
@DTYPES
@DETERMINISTIC
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_chunks_decodes_and_padding_in_one_step(block_size, is_deterministic, dtype):
    case = Case(MIXED, dtype, block_size=block_size)
    case.check(case.attend(is_deterministic))


GROUPS = [(3, 3), (2, 1), (9, 3), (10, 2), (7, 1), (16, 1)]
HEADS_AND_ROWS = [Row(40, seed=1), Row(16, 5, seed=2)]


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_groups(num_heads, num_kv_heads, dtype):
    case = Case(HEADS_AND_ROWS, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads)
    case.check(case.attend())


@DTYPES
@DETERMINISTIC
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes(head_dim, is_deterministic, dtype):
    case = Case(HEADS_AND_ROWS, dtype, head_dim=head_dim)
    case.check(case.attend(is_deterministic))


@pytest.mark.slow
@DTYPES
@QUANTISED
@DETERMINISTIC
def test_quantised_caches(is_deterministic, kv_dtype, dtype):
    case = Case([*MIXED, Row(SPLIT_KEYS, 2, seed=6)], dtype, kv_dtype)
    case.check(case.attend(is_deterministic))


@QUANTISED
def test_small_values_in_a_quantised_cache(kv_dtype):
    """A weight times a scale lost its bits in float16: 2 % of the result, at values of 1e-3 in float8."""
    case = Case([Row(300, seed=1), Row(30, 3, seed=2)], torch.float16, kv_dtype, magnitude=1e-3)
    expected = case.expected()
    # of the largest, 2e-3 are two roundings and the weights'; float16 itself has steps of 6e-8 down there
    assert (case.attend().double() - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_all_shapes(num_heads, num_kv_heads, head_dim, kv_dtype, dtype):
    case = Case(
        HEADS_AND_ROWS,
        dtype,
        kv_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        # each of them somewhere
        block_size=16 << (num_heads + HEAD_DIMS.index(head_dim)) % 4,
    )
    for is_deterministic in (False, True):
        case.check(case.attend(is_deterministic))


WINDOWED = [Row(530, seed=1), Row(SPLIT_KEYS + 1, seed=2), Row(270, 4, seed=3), Row(3, 30, seed=4), *PADDING]


@pytest.mark.slow
@DTYPES
@DETERMINISTIC
@pytest.mark.parametrize("window", [1, PAGE + 1, SPLIT_KEYS, SPLIT_KEYS + 40])
def test_sliding_window(window, is_deterministic, dtype):
    case = Case(WINDOWED, dtype, num_heads=3, num_kv_heads=1, window=window)
    case.check(case.attend(is_deterministic))


@DETERMINISTIC
def test_what_lies_before_a_window_is_not_read(is_deterministic):
    rows = [Row(300, seed=1), Row(280, 3, seed=2), Row(SPLIT_KEYS + 2, seed=3)]
    case = Case(rows, num_heads=3, num_kv_heads=1, window=PAGE + 1)
    expected = case.expected()
    for row in case.rows:
        for position in range(row.first_position - PAGE):
            slot = row.block_table[position // PAGE], position % PAGE
            case.k_cache[slot] = case.v_cache[slot] = torch.nan
    torch.testing.assert_close(case.attend(is_deterministic).double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize(("soft_cap", "window"), [(0.5, None), (30.0, None), (5.0, 20)])
def test_soft_cap(soft_cap, window, kv_dtype, dtype):
    case = Case(MIXED, dtype, kv_dtype, soft_cap=soft_cap, window=window)
    case.check(case.attend())


# exp2 of scores beside a soft cap does, to the infinity that tanh's formula expects
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_large_scores_do_not_overflow(soft_cap):
    case = Case([Row(40, seed=1), Row(3, 6, seed=2)], soft_cap=soft_cap)
    case.q *= 1e4
    # scores of 1e5, whose rounding in float32 is 1e-2
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-2, atol=1e-2)


@DTYPES
@DETERMINISTIC
def test_padding_sees_what_is_cached_and_nothing_else(is_deterministic, dtype):
    case = Case(PADDING, dtype)
    case.check(case.attend(is_deterministic))


@DTYPES
def test_padding_without_cached_tokens_is_zero_not_nan(dtype):
    case = Case([Row(0, is_padding=True), Row(0, 4, is_padding=True)], dtype)
    assert torch.equal(case.attend(), torch.zeros_like(case.q))
    assert torch.equal(case.prefill(), torch.zeros_like(case.q))
    assert torch.equal(case.decode(), torch.zeros_like(case.q))


def test_a_row_of_nan_stays_alone():
    case = Case([Row(300, seed=1), Row(9, seed=2), Row(2, 4, seed=3), Row(7, 3, seed=4)])
    expected = case.attend()
    case.q[[1, 3]] = torch.nan
    actual = case.attend()
    assert actual[[1, 3]].isnan().all()
    others = [0, 2, 4, 5, 6, 7, 8]
    assert torch.equal(actual[others], expected[others])


def test_queries_that_lie_apart():
    case = Case(MIXED)
    expected = case.attend()
    beside = torch.full((len(case.q), 11, 64), torch.nan)
    beside[:, 2:8] = case.q
    case.q = beside[:, 2:8]
    assert torch.equal(case.attend(), expected)


def test_only_tokens_of_rows_are_written():
    case = Case(MIXED)
    plan, expected = case.plan(), case.expected()
    is_decode = torch.zeros(len(case.q), dtype=torch.bool)
    is_decode[plan.decodes.query_indices.long()] = True
    outs = case.empty_out(), case.empty_out()
    caches = case.k_cache, case.v_cache
    paged_decode(outs[0], case.q, *caches, plan.decodes, plan.workspace, case.shape.num_kv_heads)
    paged_prefill(outs[1], case.q, *caches, plan.prefills, case.shape.num_kv_heads)
    for out, is_written in zip(outs, (is_decode, ~is_decode), strict=True):
        assert out[~is_written].isnan().all()
        torch.testing.assert_close(out[is_written].double(), expected[is_written], rtol=3e-6, atol=3e-6)


def test_a_plan_serves_many_layers():
    case = Case(MIXED)
    plan = case.plan()
    first = plan.attend(case.q, case.k_cache, case.v_cache)
    assert torch.equal(first, case.attend())
    plan.attend(case.q * 50, case.k_cache * -3, case.v_cache)
    assert torch.equal(plan.attend(case.q, case.k_cache, case.v_cache), first)


@pytest.mark.parametrize("rows", [DECODES[:3], [], CHUNKS[:2]], ids=["decodes", "nothing", "chunks"])
def test_steps_of_one_kind(rows):
    # a step without rows has queries and out of no tokens
    case = Case(rows or DECODES[:1])
    if not rows:
        case.rows, case.q = [], case.q[:0]
    plan = case.plan()
    assert (plan.decodes is None) == (not rows or rows == CHUNKS[:2])
    assert (plan.prefills is None) == (rows != CHUNKS[:2])
    case.check(plan.attend(case.q, case.k_cache, case.v_cache))


@DTYPES
def test_agrees_with_torch_operators(dtype):
    case = Case(MIXED, dtype, window=100)
    plan = plan_attention(case.rows, case.k_cache, case.shape)
    tolerance = TOLERANCES[dtype]
    actual = plan.attend(case.q, case.k_cache, case.v_cache)
    torch.testing.assert_close(case.attend(), actual, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, 0.0), (20, 5.0)])
def test_references(window, soft_cap, kv_dtype):
    case = Case(MIXED, torch.float32, kv_dtype, window=window, soft_cap=soft_cap)
    plan, caches, expected = case.plan(), (case.k_cache, case.v_cache), case.expected()
    q, num_kv_heads = case.q.double(), case.shape.num_kv_heads
    decoded = paged_decode_reference(q, *caches, plan.decodes, num_kv_heads, soft_cap)
    tokens = plan.decodes.query_indices.long()
    torch.testing.assert_close(decoded, expected[tokens], rtol=1e-12, atol=1e-12)
    prefilled = paged_prefill_reference(q, *caches, plan.prefills, num_kv_heads, window, soft_cap)
    prefilled[tokens] = decoded
    torch.testing.assert_close(prefilled, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8], ids=str)
def test_blocks_that_lie_beyond_32_bits(kv_dtype):
    """Of caches of several GiB, of which only the last blocks' memory is ever touched."""
    small = Case([Row(40, seed=1), Row(20, 5, seed=2)], torch.float16, kv_dtype, num_kv_heads=1, num_heads=3)
    block_numbers = small.k_cache[0].numel()
    num_blocks = (2**31 + 2**28) // block_numbers
    first = num_blocks - len(small.k_cache)
    assert first * block_numbers > 2**31

    def moved(cache):
        large = torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype)
        large[first:] = cache
        return large

    large = Case([Row(40, seed=1), Row(20, 5, seed=2)], torch.float16, kv_dtype, num_kv_heads=1, num_heads=3)
    large.k_cache, large.v_cache = moved(small.k_cache), moved(small.v_cache)
    large.rows = [
        AttentionRow(*(getattr(row, name) for name in ROW_FIELDS), [first + block for block in row.block_table])
        for row in small.rows
    ]
    assert torch.equal(large.decode(), small.decode())
    assert torch.equal(large.prefill(), small.prefill())


ROW_FIELDS = ("query_start", "num_queries", "first_position", "context_len")
