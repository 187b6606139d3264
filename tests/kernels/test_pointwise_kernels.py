"""RMS norm, SwiGLU, and rotary embedding with the cache write, each against its formula in float64."""

import math

import pytest
import torch

from noria.kernels.rms_norm import rms_norm
from noria.kernels.rope_kv_write import rope_kv_write, rotation
from noria.kernels.swiglu import swiglu

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
TOKENS = pytest.mark.parametrize("num_tokens", [0, 1, 5])


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@DTYPES
@TOKENS
@pytest.mark.parametrize("weight_shape", [(24,), (3, 24)])
def test_rms_norm(weight_shape, num_tokens, dtype):
    x, weight = torch.randn(num_tokens, 3, 24).to(dtype), torch.randn(weight_shape).to(dtype)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(rms_norm(x, weight, 1e-5), expected, dtype)


def test_rms_norm_squares_in_float32():
    # 300 squared is beyond float16
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


@DTYPES
@TOKENS
def test_swiglu(num_tokens, dtype):
    gate_up = (torch.randn(num_tokens, 26) * 4).to(dtype)
    gate, up = gate_up.double()[:, :13], gate_up.double()[:, 13:]
    assert_close(swiglu(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


def test_swiglu_of_extremes():
    assert torch.equal(swiglu(torch.tensor([[-1e4, 1e4, 2.0, 2.0]])), torch.tensor([[0.0, 2e4]]))


@DTYPES
def test_rope_kv_write(dtype):
    num_heads, num_kv_heads, head_dim, block_size = 3, 2, 6, 4
    inv_freq = [1.0, 0.3, 0.001]
    positions, slots = [0, 5, 1000, 3], [9, 2, 15, 0]
    qk = torch.randn(4, num_heads + num_kv_heads, head_dim).to(dtype)
    v = torch.randn(4, num_kv_heads, head_dim).to(dtype)
    caches = [torch.full((4, block_size, num_kv_heads, head_dim), 7.0).to(dtype) for _ in "kv"]
    turn = rotation(torch.tensor(positions), torch.tensor(inv_freq), dtype)
    q = rope_kv_write(qk, v, turn, caches[0], caches[1], torch.tensor(slots))

    expected = torch.empty(qk.shape, dtype=torch.float64)
    for token, position in enumerate(positions):
        for i, frequency in enumerate(inv_freq):
            a, b = qk[token, :, i].double(), qk[token, :, i + 3].double()
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            expected[token, :, i], expected[token, :, i + 3] = a * cos - b * sin, b * cos + a * sin
    tolerance = TOLERANCES[dtype] * (10 if dtype == torch.float32 else 1)
    torch.testing.assert_close(q.double(), expected[:, :num_heads], rtol=tolerance, atol=tolerance)
    keys, values = (cache.flatten(0, 1) for cache in caches)
    torch.testing.assert_close(keys[slots].double(), expected[:, num_heads:], rtol=tolerance, atol=tolerance)
    assert torch.equal(values[slots], v)
    untouched = [slot for slot in range(16) if slot not in slots]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def test_angles_are_exact_at_long_positions_in_half_precision():
    turn = rotation(torch.tensor([8191]), torch.tensor([1.0]), torch.bfloat16)
    assert turn.cos[0, 0, 0].item() == pytest.approx(math.cos(8191), abs=4e-3)
    assert turn.signed_sin[0, 0].tolist() == pytest.approx([-math.sin(8191), math.sin(8191)], abs=4e-3)
