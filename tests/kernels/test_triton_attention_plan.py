"""What the host prepares for the Triton kernels of attention, and what these refuse."""

import numpy as np
import pytest
import torch

from noria.kernels.attention_tiles import HEAD_DIMS, MAX_GROUP, SPLIT_KEYS, check_supported
from noria.kernels.kv_format import SCALE_BYTES, quantised
from noria.kernels.paged_attention import AttentionRow, AttentionShape
from noria.kernels.paged_decode import DecodeRows, paged_decode
from noria.kernels.paged_prefill import queries_per_tile
from noria.kernels.split_states import empty_workspace
from noria.kernels.triton_attention import decode_rows
from noria.kernels.upload import ALIGNMENT, packed, upload, views
from support.quick_interpreter import quick_interpreter  # noqa: F401
from support.triton_attention import CPU, Case, Row

PAGE = 16
# of the interpreter, about a loop whose bounds are tensors
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


def test_rows_that_are_not_there_get_zeros():
    case = Case([Row(300, seed=1), Row(3, seed=2), Row(9, seed=3), Row(2, seed=4)])
    rows = DecodeRows(*upload(decode_rows(case.rows[:2], 4, None), CPU))
    assert rows.context_lens.tolist() == [301, 4, 0, 0]
    out = case.empty_out()
    workspace = empty_workspace(int(rows.unit_starts[-1]), 6, 64, CPU)
    paged_decode(out, case.q, case.k_cache, case.v_cache, rows, workspace, 2)
    torch.testing.assert_close(out[:2].double(), case.expected()[:2], rtol=3e-6, atol=3e-6)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_splits_of_decodes():
    lengths = [0, 1, SPLIT_KEYS, SPLIT_KEYS + 1, 3 * SPLIT_KEYS]
    rows = [AttentionRow(i, 1, n - 1, n, range(-(-n // PAGE))) for i, n in enumerate(lengths)]
    of_all = DecodeRows(*decode_rows(rows, 5, None))
    assert of_all.unit_starts.tolist() == [0, 0, 1, 2, 4, 7]
    assert of_all.first_keys.tolist() == [0] * 5
    of_window = DecodeRows(*decode_rows(rows, 5, SPLIT_KEYS + 1))
    # the last row sees the last key of its first split
    assert of_window.first_keys.tolist() == [0, 0, 0, 0, 2 * SPLIT_KEYS - 1]
    assert of_window.unit_starts.tolist() == [0, 0, 1, 2, 4, 6]
    assert DecodeRows(*decode_rows(rows, 5, 1)).unit_starts.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_tile_holds_a_whole_group(is_deterministic):
    for head_dim in HEAD_DIMS:
        shape = AttentionShape(num_heads=MAX_GROUP, num_kv_heads=1, head_dim=head_dim)
        for dtype in (torch.float32, torch.bfloat16):
            for kv_dtype in (dtype, torch.int8):
                assert queries_per_tile(dtype, kv_dtype, shape, is_deterministic) >= 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "dtype must be one of"),
        ({"kv_dtype": torch.float16}, "kv_cache_dtype must be torch.bfloat16, int8 or"),
        ({"head_dim": 72}, "head_dim must be one of 64, 80"),
        ({"group": 17}, "num_heads / num_kv_heads must be from 1 to 16, not 17"),
        ({"block_size": 8}, "block_size must be one of 16"),
    ],
)
def test_what_is_not_supported_is_named(change, names):
    supported = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "head_dim": 64, "group": 16, "block_size": 16}
    check_supported(**supported)
    with pytest.raises(ValueError, match=names):
        check_supported(**(supported | change))


def test_tensors_of_another_shape_are_refused():
    case = Case([Row(20, seed=1), Row(3, 4, seed=2)])
    attend = case.plan().attend
    with pytest.raises(ValueError, match="q must be contiguous in its last two dimensions"):
        attend(case.q.transpose(1, 2).contiguous().transpose(1, 2), case.k_cache, case.v_cache)
    with pytest.raises(ValueError, match="must be contiguous"):
        attend(case.q, case.k_cache.transpose(0, 1), case.v_cache)
    with pytest.raises(ValueError, match="must be contiguous"):
        attend(case.q, case.k_cache[..., :32], case.v_cache)
    with pytest.raises(ValueError, match=f"a multiple of {2 * (64 + SCALE_BYTES)} bytes"):
        attend(case.q, torch.empty(4, 1000, dtype=torch.int8), case.v_cache)


def test_what_a_quantised_cache_loses():
    """So that tests of quantised caches, which compare with what the cache holds, are of something near the truth."""
    x = torch.randn(50, 64)
    for dtype, error in ((torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2**-4)):
        numbers, scales = quantised(x, dtype)
        largest = x.abs().amax(-1, keepdim=True)
        assert ((numbers.float() * scales[:, None] - x).abs() <= error * largest * 1.001).all()


def test_upload():
    arrays = [
        np.arange(5, dtype=np.int32),
        np.empty((0, 3), dtype=np.int32),
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.array([7], dtype=np.uint8),
        np.arange(24, dtype=np.int64).reshape(4, 6)[::2, 1:3],
        np.empty(0, dtype=np.float32),
        np.array([[True], [False]]),
    ]
    packed_arrays = packed(arrays, CPU)
    # what a CPU has, and a GPU
    for tensors in (upload(arrays, CPU), views(packed_arrays, arrays)):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert tensor.is_contiguous()
            assert tensor.dtype == torch.from_numpy(array).dtype
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)
    assert packed_arrays.dim() == 1
    assert upload([], CPU) == views(packed([], CPU), []) == []
