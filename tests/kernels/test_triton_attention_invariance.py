"""Attention of the Triton kernels, in the interpreter: a row has the same bits whatever is computed beside it, and how.

Products are those of `ordered_dot`.
"""

import numpy as np
import pytest
import torch

from noria.kernels import paged_decode as paged_decode_module
from noria.kernels.attention_tiles import SPLIT_KEYS
from support.quick_interpreter import quick_interpreter  # noqa: F401
from support.triton_attention import Case, Row, ordered_dot  # noqa: F401

PAGE = 16
# of the interpreter, about a loop whose bounds are tensors
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


def token_slices(rows):
    starts = np.cumsum([0, *(row.num_queries for row in rows)])
    return {row: slice(start, start + row.num_queries) for row, start in zip(rows, starts, strict=False)}


FRIENDS = [
    Row(300, seed=1),
    Row(PAGE - 1, seed=2),
    Row(SPLIT_KEYS, 7, seed=3),
    Row(2, 50, seed=4),
    Row(9, is_padding=True),
]


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("kernel", [Case.decode, Case.prefill], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [(torch.float32, None, None), (torch.float16, None, 100), (torch.float16, torch.int8, None)],
    ids=str,
)
def test_a_row_does_not_change_with_its_batch_mates(dtype, kv_dtype, window, kernel):
    rows = [row for row in FRIENDS if kernel is Case.prefill or row.num_queries == 1]

    def attend(rows, block_order):
        return kernel(Case(rows, dtype, kv_dtype, num_heads=3, num_kv_heads=1, window=window, block_order=block_order))

    together, reordered = attend(rows, 0), attend(rows[::-1], 1)
    for row in rows:
        alone = attend([row], 2)
        assert torch.equal(together[token_slices(rows)[row]], alone)
        assert torch.equal(reordered[token_slices(rows[::-1])[row]], alone)


def test_the_number_of_programs_does_not_change_a_decode(monkeypatch):
    case = Case([Row(300, seed=1), Row(0, is_padding=True), Row(20, seed=2)], num_heads=4, num_kv_heads=2)
    expected = case.decode()
    for num_programs in (1, 5, 100):
        monkeypatch.setattr(paged_decode_module, "num_programs", lambda device, num_per_sm, count=num_programs: count)
        assert torch.equal(case.decode(), expected)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window", "soft_cap"),
    [
        (torch.float32, None, None, 0.0),
        (torch.float32, None, 5, 0.0),
        pytest.param(torch.float16, None, 100, 5.0, marks=pytest.mark.slow),
        pytest.param(torch.float16, torch.int8, None, 0.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_deterministic_queries_have_the_same_bits_in_any_chunk_and_decoded(dtype, kv_dtype, window, soft_cap):
    # a prompt across the edge between two splits
    begin, end = SPLIT_KEYS - 4, SPLIT_KEYS + 3

    def attend(chunks, kernel=Case.attend):
        outs = []
        position = begin
        for num_queries in chunks:
            rows = [Row(30, 3, seed=2), Row(position, num_queries, seed=1)]
            case = Case(rows, dtype, kv_dtype, num_heads=3, num_kv_heads=1, window=window, soft_cap=soft_cap)
            outs.append(kernel(case, True)[3:])
            position += num_queries
        assert position == end
        return torch.cat(outs)

    whole = attend([7])
    assert not whole.isnan().any()
    assert torch.equal(attend([7], Case.decode), whole)
    assert torch.equal(attend([1, 6], Case.prefill), whole)
    # of one query each to the decode kernel
    assert torch.equal(attend([3, 1, 1, 2]), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.float16, torch.float8_e4m3fn)], ids=str)
def test_deterministic_prompts_of_several_splits(dtype, kv_dtype, head_dim):
    case = Case([Row(2 * SPLIT_KEYS - 5, 12, seed=1)], dtype, kv_dtype, num_heads=5, num_kv_heads=1, head_dim=head_dim)
    case.check(case.attend(True))
    assert torch.equal(case.attend(True), case.decode(True))
