"""Products with packed weights, through the packer and the C interface: float32 against float64, int8 and int4
against the same roundings in torch, and that a row's result is that row's alone, bit for bit.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from noria.kernels.cpu_library import GROUP, WEIGHT_FORMATS
from noria.kernels.cpu_weights import LARGEST, CpuWeights
from support.cpu_libraries import libraries_that_run
from support.rounded_weights import in_groups, int4_weights, int8_weights, rounded_activations

LIBRARIES = libraries_that_run()
NUM_ROWS = [1, 2, 3, 4, 5, 10, 11, 17]
# outputs at the borders of a panel of 16, inputs at those of a vector, of a pair and of a group of 32
SHAPES = [(1, 2), (15, 3), (16, 8), (17, 30), (33, 576), (1, 1), (16, 33), (40, 64)]
GUARD = 12345.0


@pytest.fixture(params=LIBRARIES, autouse=True)
def library(request, monkeypatch):
    """All that is said of the kernels holds for each instruction set that they were compiled for."""
    monkeypatch.setattr(Layer, "library", LIBRARIES[request.param], raising=False)
    return LIBRARIES[request.param]


class Layer:
    library: ctypes.CDLL

    def __init__(self, weight: Tensor, bias: Tensor | None = None, weight_format: str = "float32") -> None:
        self._weights = CpuWeights(self.library)
        self._linear = self._weights.pack(weight_format, weight, bias)
        self._num_outputs = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, outputs] of x [rows, inputs]; nothing behind them may be written."""
        x, count = x.contiguous(), len(x) * self._num_outputs
        memory = torch.full((count + 16,), GUARD)
        self.library.noria_linear(ctypes.byref(self._linear), x.data_ptr(), len(x), memory.data_ptr())
        assert (memory[count:] == GUARD).all()
        return memory[:count].view(len(x), -1)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_different_sizes(
    num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight, x and bias: rows and outputs of very different sizes, which each need their own scale."""
    weight = randn(num_outputs, num_inputs) * 10.0 ** randn(num_outputs, 1, seed=2)
    x = randn(num_rows, num_inputs, seed=num_rows) * 10.0 ** randn(num_rows, 1, seed=3)
    return weight, x, randn(num_outputs, seed=1) if has_bias else None


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
    weight, x, bias = of_different_sizes(num_rows, num_outputs, num_inputs, has_bias)
    exact_weight, exact_x = int8_weights(weight), rounded_activations(x)
    shift = 0 if bias is None else bias.double()
    size = exact_x.abs() @ exact_weight.abs().T + abs(shift)
    assert ((Layer(weight, bias, "int8")(x).double() - exact_x @ exact_weight.T - shift).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_int4_is_the_product_of_the_rounded_numbers(num_rows, num_outputs, num_inputs, has_bias):
    weight, x, bias = of_different_sizes(num_rows, num_outputs, num_inputs, has_bias)
    exact_weight, exact_x = int4_weights(weight), rounded_activations(x)
    shift = 0 if bias is None else bias.double()
    # a group's products with the numbers above its minimum, and the minimum's own product, are rounded apart
    size = exact_x.abs() @ (exact_weight.abs() + 2 * in_groups(weight.double()).abs().amax((1, 2))[:, None]).T + abs(
        shift
    )
    assert ((Layer(weight, bias, "int4")(x).double() - exact_x @ exact_weight.T - shift).abs() <= 1e-6 * size).all()


def test_int4_keeps_what_has_a_scale_and_a_minimum():
    """What GGUF's Q4_1 stands for: 16 steps of a float16 scale from a float16 minimum on, both ends used."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (48, 5, GROUP), generator=generator)
    steps[:, :, 3], steps[:, :, 29] = 0, 15
    scale = (randn(48, 5, 1).abs() * 0.1).half().float()
    minimum = (randn(48, 5, 1, seed=1) - 1).half().float()
    weight = (scale * steps + minimum).flatten(1)
    # each row asks for one input of every output
    assert torch.equal(Layer(weight, None, "int4")(torch.eye(weight.shape[1])), weight.T)


def test_int8_keeps_what_has_a_scale():
    """What GGUF's Q8_0 stands for: whole numbers up to 127, one of them that large, times a float16 scale."""
    steps = torch.randint(-127, 128, (48, 5, GROUP), generator=torch.Generator().manual_seed(0))
    steps[:, :, 7] = 127
    weight = ((randn(48, 5, 1).abs() * 0.1).half().float() * steps).flatten(1)
    assert torch.equal(Layer(weight, None, "int8")(torch.eye(weight.shape[1])), weight.T)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-5, 3e-6, 1e-7, 1e-40])
def test_int8_holds_small_weights_within_half_a_step(size):
    """Whose scale float16 has few digits for, or none at all below 6e-8."""
    weight = randn(48, 96).clamp(-1, 1) * size
    found = Layer(weight, None, "int8")(torch.eye(96)).T
    groups = in_groups(weight)
    scale = (groups.abs().amax(2, keepdim=True) / 127).expand_as(groups).flatten(1)
    # float16 has steps of 2 ** -24 there
    assert ((found - weight).abs() <= 0.51 * (scale * (1 + 2**-10) + 2**-24)).all()


def test_int8_weights_of_zero_take_rows_of_any_size():
    weight = torch.cat((torch.zeros(16, 32), torch.ones(16, 32)), 1)
    x = torch.cat((torch.full((3, 32), 1e38), torch.ones(3, 32)), 1)
    torch.testing.assert_close(Layer(weight, None, "int8")(x), torch.full((3, 16), 32.0), atol=0, rtol=2**-10)


def test_int8_stays_near_the_exact_product():
    weight, x = randn(64, 576), randn(8, 576, seed=1)
    exact = x.double() @ weight.double().T
    error = (Layer(weight, None, "int8")(x) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    # weights and rows are rounded to 127 levels up to the largest of 32 normal numbers, about 2.1:
    # sqrt(2) 2.1 / 127 / sqrt(12) is 0.0068
    assert 0.005 < error < 0.009


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_inputs", [3, 100, 576])
def test_a_row_is_the_same_beside_any_mates(weight_format, num_inputs):
    layer, x = Layer(randn(40, num_inputs), randn(40, seed=1), weight_format), randn(1, num_inputs, seed=2)
    alone = layer(x)
    assert alone.isfinite().all()
    # int4 weights are unpacked for 9 rows and more
    for num_mates in (1, 2, 3, 4, 8, 9, 10, 15):
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
    for weight_format in WEIGHT_FORMATS:
        layer = Layer(weight, None, weight_format)
        expected = layer(x)
        spoiled = x.clone()
        spoiled[2, place] = bad
        found = layer(spoiled)
        # inf times a rounding to whole numbers has no meaning; without one it is inf
        wanted = bad if weight_format == "float32" and bad == bad else torch.nan
        torch.testing.assert_close(found[2], torch.full((20,), wanted), equal_nan=True)
        assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_zeros_and_the_smallest_and_the_largest_numbers():
    # of the rows and of the outputs: 0 stays 0, with a bias the bias
    weight, bias = torch.cat((torch.zeros(3, 50), torch.ones(3, 50))), randn(6)
    normal = torch.tensor([0.0, 1e-30, 1.0, 1e30])
    subnormal = torch.full((1, 50), 1e-42)
    x = torch.cat((normal[:, None].expand(-1, 50), subnormal))
    for weight_format in WEIGHT_FORMATS:
        y = Layer(weight, None, weight_format)(x)
        assert (y[:, :3] == 0).all()
        # a scale of 1 / 127 is rounded upwards to float16
        rtol = 2**-10 if weight_format == "int8" else 1e-6
        torch.testing.assert_close(y[:4, 3:], 50 * normal[:, None].expand(-1, 3), atol=0, rtol=rtol)
        # kept in float32, nothing where it is rounded
        torch.testing.assert_close(
            y[4, 3:], torch.full((3,), 5e-41 if weight_format == "float32" else 0.0), atol=1e-43, rtol=0
        )
        shifted = Layer(weight, bias, weight_format)(x)
        assert torch.equal(shifted[0], bias)
        assert torch.equal(shifted[:, :3], bias[:3].expand(5, -1))


@pytest.mark.parametrize("num_inputs", [32, 96, 8193])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_of_int8_are_exact(num_inputs, sign):
    """All numbers at their limit, of either sign."""
    layer = Layer(torch.full((17, num_inputs), 127 * sign), None, "int8")
    for x in (127.0, -127.0):
        exact = torch.full((5, 17), 127 * sign * x * num_inputs)
        assert torch.equal(layer(torch.full((5, num_inputs), x)), exact)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_of_int4_do_not_overflow(sign):
    """In int16: 8 pairs of 15 * 127 are 30,480. One number at 0, so that all others are at 15."""
    weight = torch.full((17, 64), 3.75)
    weight[:, ::32] = 0
    x = torch.full((5, 64), 5.0 * sign)
    torch.testing.assert_close(Layer(weight, None, "int4")(x), torch.full((5, 17), 3.75 * 5 * sign * 62))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("weight_format", "size", "message"),
    [
        ("int4", 1e5, "int4 holds weights of up to 65,504 .* has one of 100,000: use int8"),
        ("int4", 1e7, "int4 holds weights of up to 65,504 .* has one of 10,000,000: use none"),
        ("int8", 1e7, "int8 holds weights of up to 8,319,008 .* has one of 10,000,000: use none"),
    ],
)
def test_weights_beyond_float16_are_refused(weight_format, size, message, sign):
    weights = randn(20, 64)
    weights[4, 40] = sign * size
    with pytest.raises(ValueError, match=message):
        Layer(weights, None, weight_format)
    weights[4, 40] = sign * LARGEST[weight_format]
    assert Layer(weights, None, weight_format)(randn(3, 64, seed=1)).isfinite().all()


@pytest.mark.parametrize("place", [0, 9])
def test_a_weight_that_is_not_a_number_shows_in_its_output(place):
    """A checkpoint that holds NaN must not be answered with plausible text."""
    weight = randn(20, 20)
    weight[4, place] = torch.nan
    for weight_format in ("int8", "int4"):
        y = Layer(weight, None, weight_format)(randn(3, 20, seed=1))
        assert y[:, 4].isnan().all()
        assert y[:, [*range(4), *range(5, 20)]].isfinite().all()


def test_weights_that_are_not_contiguous_are_packed_as_they_read():
    weight, x = randn(30, 20), randn(3, 30, seed=1)
    for weight_format in WEIGHT_FORMATS:
        expected = Layer(weight.T.contiguous(), None, weight_format)(x)
        assert torch.equal(Layer(weight.T, None, weight_format)(x), expected)


def found_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    peaks, ids = torch.empty(len(scores)), torch.empty(len(scores), dtype=torch.int64)
    Layer.library.noria_largest(scores.data_ptr(), *scores.shape, peaks.data_ptr(), ids.data_ptr())
    return peaks, ids


@pytest.mark.parametrize("count", [1, 7, 8, 511, 512, 513, 1025, 5000])
def test_the_largest_score_is_that_of_torch_and_the_first_of_equals(count):
    scores = randn(6, count)
    # few different numbers: many equals
    scores[1] = scores[1].round()
    scores[2] = -torch.inf
    scores[3] = -0.0
    scores[3, -1] = 0.0
    scores[4, count // 2 :] = torch.inf
    scores[5] = -scores[5].abs()
    peaks, ids = found_largest(scores)
    assert torch.equal(peaks, scores.amax(-1))
    assert ids.tolist() == [row.index(max(row)) for row in scores.tolist()]


@pytest.mark.parametrize("count", [1, 8, 513, 1030])
def test_one_nan_makes_the_largest_score_nan(count):
    for place in {0, count // 2, count - 1}:
        for beside in (0.0, torch.inf, -torch.inf):
            scores = torch.full((2, count), beside)
            scores[1, place] = torch.nan
            peaks, _ = found_largest(scores)
            assert peaks[0] == beside
            assert peaks[1].isnan()
