"""Products with packed weights, through the packer and the C interface: float32 against float64, int8 against the same
roundings in torch, and that a row's result is that row's alone, bit for bit.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from noria.kernels.cpu_library import load_library
from noria.kernels.cpu_weights import CpuWeights

LIBRARY = load_library()
NUM_ROWS = [1, 2, 3, 4, 5, 17]
# outputs at the borders of a panel of 16, inputs at those of a vector and of a pair
SHAPES = [(1, 2), (15, 3), (16, 8), (17, 30), (33, 576), (1, 1)]
GUARD = 12345.0


class Layer:
    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_quantized: bool = False) -> None:
        self._weights = CpuWeights(LIBRARY, is_quantized)
        self._linear = self._weights.pack(weight, bias)
        self._num_outputs = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, outputs] of x [rows, inputs]; nothing behind them may be written."""
        x, count = x.contiguous(), len(x) * self._num_outputs
        memory = torch.full((count + 16,), GUARD)
        LIBRARY.noria_linear(ctypes.byref(self._linear), x.data_ptr(), len(x), memory.data_ptr())
        assert (memory[count:] == GUARD).all()
        return memory[:count].view(len(x), -1)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activation_limit(num_inputs: int) -> int:
    return min(32767, 2**31 // (128 * num_inputs))


def int8_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sums of whole numbers are exact in float64."""
    limit = activation_limit(x.shape[1])
    weight_scale = weight.abs().amax(1, keepdim=True) / 127
    whole_weight = (weight / weight_scale).round()
    row_scale = x.abs().amax(1, keepdim=True) / limit
    whole_x = (x * (limit / x.abs().amax(1, keepdim=True))).round()
    assert whole_weight.abs().max() == 127
    assert whole_x.abs().amax(1).eq(limit).all()
    product = (whole_x.double() @ whole_weight.double().T) * row_scale.double() * weight_scale.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_float32_is_float64_but_for_rounding(num_rows, num_outputs, num_inputs, has_bias):
    weight, x = randn(num_outputs, num_inputs), randn(num_rows, num_inputs, seed=num_rows)
    bias = randn(num_outputs, seed=1) if has_bias else None
    shift = 0 if bias is None else bias.double()
    exact = x.double() @ weight.double().T + shift
    # of the sum of the products' sizes, which is what a rounding of each partial sum is relative to
    size = x.double().abs() @ weight.double().abs().T + abs(shift)
    assert ((Layer(weight, bias)(x) - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_is_the_product_of_the_rounded_numbers(num_rows, num_outputs, num_inputs, has_bias):
    # rows and outputs of very different sizes: each has its own scale
    weight = randn(num_outputs, num_inputs) * 10.0 ** randn(num_outputs, 1, seed=2)
    x = randn(num_rows, num_inputs, seed=num_rows) * 10.0 ** randn(num_rows, 1, seed=3)
    bias = randn(num_outputs, seed=1) if has_bias else None
    found, expected = Layer(weight, bias, True)(x).double(), int8_reference(x, weight, bias)
    # float32 rounds the sum, and x by its scale before it becomes a whole number: here and there one goes the other way
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    assert ((found - expected).abs() <= 1e-6 * size).all()


def test_int8_stays_near_the_exact_product():
    weight, x = randn(64, 576), randn(8, 576, seed=1)
    exact = x.double() @ weight.double().T
    error = (Layer(weight, None, True)(x) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    # a uniform rounding of 127 levels up to the largest of 576 normal numbers, about 3.2: 3.2 / 127 / sqrt(12) = 0.0073
    assert 0.005 < error < 0.01


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("num_inputs", [3, 100, 576])
def test_a_row_is_the_same_beside_any_mates(is_quantized, num_inputs):
    layer, x = Layer(randn(40, num_inputs), randn(40, seed=1), is_quantized), randn(1, num_inputs, seed=2)
    alone = layer(x)
    assert alone.isfinite().all()
    for num_mates in (1, 2, 3, 4, 8, 15):
        mates = randn(num_mates, num_inputs, seed=num_mates)
        hostile = mates.clone()
        hostile[::3, 0], hostile[1::3, -1], hostile[2::3, 1] = torch.nan, torch.inf, -torch.inf
        for others in (mates, mates * 100, hostile, torch.zeros_like(mates)):
            for place in range(num_mates + 1):
                assert torch.equal(layer(torch.cat((others[:place], x, others[place:])))[place], alone[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 7, 8, 15, 16, 19])
def test_a_row_that_is_not_finite_shows_it_and_spoils_no_other(bad, place):
    weight, x = randn(20, 20).abs(), randn(5, 20, seed=1)
    for is_quantized in (False, True):
        layer = Layer(weight, None, is_quantized)
        expected = layer(x)
        spoiled = x.clone()
        spoiled[2, place] = bad
        found = layer(spoiled)
        # inf times a rounding to whole numbers has no meaning; without one it is inf
        wanted = bad if not is_quantized and bad == bad else torch.nan
        torch.testing.assert_close(found[2], torch.full((20,), wanted), equal_nan=True)
        assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_zeros_and_the_smallest_and_the_largest_numbers():
    # of the rows and of the outputs: 0 stays 0, with a bias the bias
    weight, bias = torch.cat((torch.zeros(3, 50), torch.ones(3, 50))), randn(6)
    normal = torch.tensor([0.0, 1e-30, 1.0, 1e30])
    subnormal = torch.full((1, 50), 1e-42)
    x = torch.cat((normal[:, None].expand(-1, 50), subnormal))
    for is_quantized in (False, True):
        y = Layer(weight, None, is_quantized)(x)
        assert (y[:, :3] == 0).all()
        torch.testing.assert_close(y[:4, 3:], 50 * normal[:, None].expand(-1, 3), atol=0, rtol=1e-6)
        # kept in float32, nothing in int8
        torch.testing.assert_close(y[4, 3:], torch.full((3,), 0.0 if is_quantized else 5e-41), atol=1e-43, rtol=0)
        shifted = Layer(weight, bias, is_quantized)(x)
        assert torch.equal(shifted[0], bias)
        assert torch.equal(shifted[:, :3], bias[:3].expand(5, -1))


@pytest.mark.parametrize("num_inputs", [576, 1536, 8192, 8193, 16384])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_do_not_overflow(num_inputs, sign):
    """All numbers at their limit. In int32: num_inputs * 127 * activation_limit is up to 2^31 * 127 / 128."""
    layer = Layer(torch.full((17, num_inputs), 3.0 * sign), None, True)
    x = torch.full((5, num_inputs), 5.0)
    torch.testing.assert_close(layer(x), torch.full((5, 17), 15.0 * sign * num_inputs))


@pytest.mark.parametrize("place", [0, 9])
def test_a_weight_that_is_not_a_number_shows_in_its_output(place):
    """A checkpoint that holds NaN must not be answered with plausible text."""
    weight = randn(20, 20)
    weight[4, place] = torch.nan
    y = Layer(weight, None, True)(randn(3, 20, seed=1))
    assert y[:, 4].isnan().all()
    assert y[:, [*range(4), *range(5, 20)]].isfinite().all()


def test_weights_that_are_not_contiguous_are_packed_as_they_read():
    weight, x = randn(30, 20), randn(3, 30, seed=1)
    for is_quantized in (False, True):
        expected = Layer(weight.T.contiguous(), None, is_quantized)(x)
        assert torch.equal(Layer(weight.T, None, is_quantized)(x), expected)
