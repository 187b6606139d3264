"""Products with packed weights against float64, and that a row's result is that row's alone."""

from __future__ import annotations

import ctypes

import pytest
import torch

from noria.kernels.cpu_library import load_library
from noria.models.cpu_decoder import _Packer

LIBRARY = load_library()


class Layer:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_quantized: bool) -> None:
        self._packer = _Packer(LIBRARY, {}, is_quantized)
        self._linear = self._packer.pack(weight, bias)
        self._num_outputs = len(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), self._num_outputs), torch.nan)
        LIBRARY.noria_linear(ctypes.byref(self._linear), x.data_ptr(), len(x), y.data_ptr())
        return y


def rounded(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Each row as multiples of its largest / limit, in float64."""
    scale = x.abs().amax(-1, keepdim=True) / limit
    return (x / scale).round().double() * scale.double()


def activation_limit(num_inputs: int) -> int:
    return min(2047, 2**31 // (128 * num_inputs))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (15, 3), (16, 8), (17, 30), (33, 64), (48, 576)])
def test_products_on_odd_shapes(num_rows, num_outputs, num_inputs):
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = (torch.randn(n, num_inputs, generator=generator) for n in (num_outputs, num_rows))
    bias = torch.randn(num_outputs, generator=generator)
    for own_bias in (None, bias):
        shift = 0 if own_bias is None else own_bias.double()
        exact = x.double() @ weight.double().T + shift
        torch.testing.assert_close(Layer(weight, own_bias, False)(x).double(), exact, rtol=1e-4, atol=1e-4)
        # a number half way between two may be rounded either way: one unit of each factor at most
        approximate = rounded(x, activation_limit(num_inputs)) @ rounded(weight, 127).T + shift
        torch.testing.assert_close(Layer(weight, own_bias, True)(x).double(), approximate, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_row_is_the_same_beside_any_mates(is_quantized):
    generator = torch.Generator().manual_seed(0)
    layer = Layer(torch.randn(40, 100, generator=generator), None, is_quantized)
    x = torch.randn(1, 100, generator=generator)
    alone = layer(x)
    for num_mates in (1, 2, 3, 4, 8, 15):
        mates = torch.randn(num_mates, 100, generator=generator) * 100
        mates[0, 3], mates[-1, 5] = torch.inf, torch.nan
        for place in (0, num_mates):
            batch = torch.cat((mates[:place], x, mates[place:]))
            assert torch.equal(layer(batch)[place], alone[0])
            assert layer(batch)[0 if place else 1].isnan().all() or not is_quantized


@pytest.mark.parametrize("num_inputs", [576, 1536, 8192, 16384])
def test_the_largest_sums_do_not_overflow(num_inputs):
    layer = Layer(torch.full((16, num_inputs), -3.0), None, True)
    x = torch.full((2, num_inputs), 5.0)
    torch.testing.assert_close(layer(x), torch.full((2, 16), -15.0 * num_inputs))


def test_rows_and_weights_of_zeros_and_of_the_smallest_numbers():
    layer = Layer(torch.cat((torch.zeros(3, 50), torch.ones(3, 50))), None, True)
    x = torch.stack((torch.zeros(50), torch.full((50,), 1e-42), torch.ones(50)))
    y = layer(x)
    assert (y[:2] == 0).all()
    assert (y[2, :3] == 0).all()
    torch.testing.assert_close(y[2, 3:], torch.full((3,), 50.0))
