"""RMS norm, its residual sum and SwiGLU as Triton kernels, in the interpreter, against their formulas in float64.

Not in bfloat16: the interpreter cuts it off where a GPU rounds it.
"""

import pytest
import torch

from noria.kernels.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm_triton
from noria.kernels.swiglu import swiglu_triton

# half a unit in the last place, for the one rounding there is, and in float32 some for the sums
TOLERANCES = {torch.float32: 2e-6, torch.float16: 5.2e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
EPS = 1e-5


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    # below its normal numbers float16 goes in steps of 6e-8
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=1e-6)


def exact_norm(x, weight):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_swiglu(gate_up):
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


@pytest.fixture(scope="module")
def huge():
    """More numbers than 32 bits can count; only what is written to takes memory."""
    return torch.empty(2**31 + 2**12, dtype=torch.float16)


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("num_features", [1, 7, 576, 2048, 14336])
def test_rms_norm(num_features, num_rows, dtype):
    x, weight = torch.randn(num_rows, num_features).to(dtype), torch.randn(num_features).to(dtype)
    assert_close(rms_norm_triton(x, weight, EPS), exact_norm(x, weight), dtype)


@DTYPES
@pytest.mark.parametrize("weight_heads", [(), (5,)])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_rms_norm_of_heads_within_a_wider_row(head_dim, weight_heads, dtype):
    qkv = torch.randn(3, 9, head_dim).to(dtype)
    qk, weight = qkv[:, :5], torch.randn(*weight_heads, head_dim).to(dtype)
    before = qkv.clone()
    assert_close(rms_norm_triton(qk, weight, EPS), exact_norm(qk, weight), dtype)
    assert torch.equal(qkv, before)


def test_rms_norm_of_more_heads_than_a_program_takes():
    # 8 heads of 128 at once: the last program has 3
    x, weight = torch.randn(2, 19, 128), torch.randn(19, 128)
    assert_close(rms_norm_triton(x, weight, EPS), exact_norm(x, weight), torch.float32)


def test_rms_norm_squares_in_float32():
    # 300 squared is beyond float16
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm_triton(x, torch.ones(8, dtype=torch.float16), EPS), torch.ones_like(x))


def test_rms_norm_of_zeros_is_zero_and_of_nan_nan_in_its_own_row():
    x = torch.zeros(3, 5)
    x[1, 2] = torch.nan
    y = rms_norm_triton(x, torch.ones(5), EPS)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], torch.zeros(2, 5))


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("num_features", [13, 576, 4096])
def test_add_rms_norm(num_features, num_rows, dtype):
    # rows apart, and beside them what must stay
    wide = torch.randn(num_rows, num_features + 3).to(dtype)
    x, delta = wide[:, :num_features], torch.randn(num_rows, num_features + 1).to(dtype)[:, 1:]
    weight = torch.randn(num_features).to(dtype)
    total, beside = x + delta, wide[:, num_features:].clone()
    assert_close(add_rms_norm_triton(x, delta, weight, EPS), exact_norm(total, weight), dtype)
    assert torch.equal(x, total)
    assert torch.equal(wide[:, num_features:], beside)


@DTYPES
def test_add_rms_norm_of_torch(dtype):
    x, delta, weight = torch.randn(4, 24).to(dtype), torch.randn(4, 24).to(dtype), torch.randn(24).to(dtype)
    total = x + delta
    torch.testing.assert_close(
        add_rms_norm(x, delta, weight, EPS).double(), exact_norm(total, weight), rtol=2e-3, atol=1e-5
    )
    assert torch.equal(x, total)


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("num_features", [1, 13, 1536, 3000])
def test_swiglu(num_features, num_rows, dtype):
    gate_up = (torch.randn(num_rows, 2 * num_features) * 4).to(dtype)
    assert_close(swiglu_triton(gate_up), exact_swiglu(gate_up), dtype)


def test_swiglu_of_rows_apart():
    gate_up = torch.randn(3, 50)[:, 4:30]
    assert_close(swiglu_triton(gate_up), exact_swiglu(gate_up), torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_extremes():
    assert torch.equal(swiglu_triton(torch.tensor([[-1e4, 1e4, 2.0, 2.0]])), torch.tensor([[0.0, 2e4]]))


@DTYPES
def test_a_row_is_the_same_beside_any_others(dtype):
    x, weight, gate_up = torch.randn(7, 576).to(dtype), torch.randn(576).to(dtype), torch.randn(7, 3000).to(dtype)
    heads, head_weight = torch.randn(7, 12, 64).to(dtype), torch.randn(12, 64).to(dtype)
    together = (
        rms_norm_triton(x, weight, EPS),
        rms_norm_triton(heads, head_weight, EPS),
        add_rms_norm_triton(x.clone(), x, weight, EPS),
        swiglu_triton(gate_up),
    )
    for row in range(7):
        only = slice(row, row + 1)
        alone = (
            rms_norm_triton(x[only], weight, EPS),
            rms_norm_triton(heads[only], head_weight, EPS),
            add_rms_norm_triton(x[only].clone(), x[only], weight, EPS),
            swiglu_triton(gate_up[only]),
        )
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


def test_rows_beyond_32_bits(huge):
    x = huge.as_strided((3, 64), (2**30 + 16, 1))
    x[:] = torch.randn(3, 64)
    weight = torch.randn(64).half()
    assert_close(rms_norm_triton(x, weight, EPS), exact_norm(x, weight), torch.float16)
    assert_close(swiglu_triton(x), exact_swiglu(x), torch.float16)
    total = x + 1
    assert_close(
        add_rms_norm_triton(x, torch.ones(3, 64).half(), weight, EPS), exact_norm(total, weight), torch.float16
    )
    assert torch.equal(x, total)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda x, w: rms_norm_triton(x[0], w, EPS), "x must be"),
        (lambda x, w: rms_norm_triton(x.T, w, EPS), "x must be"),
        (lambda x, w: rms_norm_triton(x, w[:3], EPS), "weight must be"),
        (lambda x, w: rms_norm_triton(x, torch.stack((w, w), 1)[:, 0], EPS), "weight must be"),
        (lambda x, w: add_rms_norm_triton(x, x[:1], w, EPS), "delta must be"),
        (lambda x, w: add_rms_norm_triton(x, x.half(), w, EPS), "delta must be"),
        (lambda x, w: add_rms_norm_triton(w.expand(2, 4), x, w, EPS), "rows must not overlap"),
        (lambda x, w: swiglu_triton(x[:, :3]), "gate_up must be"),
        (lambda x, w: swiglu_triton(x.T), "gate_up must be"),
    ],
)
def test_arguments_that_no_kernel_takes(launch, message):
    with pytest.raises(ValueError, match=message):
        launch(torch.randn(2, 4), torch.randn(4))
