"""Linear layers for a GPU, under Triton's interpreter: which one is packed, and what rounding its weights does."""

import pytest
import torch

from noria.kernels.kv_format import LARGEST
from noria.kernels.linear import InvariantLinear, linear_packer, pack_linear
from noria.kernels.quantised_linear import (
    WEIGHT_DTYPES,
    QuantisationErrors,
    QuantisedLinear,
    quantisation_error,
    quantise_linear,
)

QUANTISATIONS = list(WEIGHT_DTYPES)


def random_layer(out_features=24, in_features=40, dtype=torch.float16):
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    return weight, torch.randn(out_features, generator=generator).to(dtype)


def random_rows(num_rows, in_features=40, dtype=torch.float16):
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_without_options_weights_stay_plain():
    assert linear_packer("none", is_deterministic=False) is pack_linear


@pytest.mark.parametrize("has_bias", [False, True])
def test_deterministic_is_invariant(has_bias):
    weight, bias = random_layer()
    linear = linear_packer("none", is_deterministic=True)(weight, bias if has_bias else None)
    assert isinstance(linear, InvariantLinear)
    x = random_rows(5)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(linear(x).double(), expected, rtol=2e-3, atol=2e-3)


def test_deterministic_takes_weights_that_are_not_contiguous():
    weight, _ = random_layer()
    linear = linear_packer("none", is_deterministic=True)(weight.T.contiguous().T, None)
    x = random_rows(3)
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.double().T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("weight_quantization", QUANTISATIONS)
@pytest.mark.parametrize("num_rows", [0, 1, 20, 70])
def test_quantised_layer_computes_with_the_weights_it_says(num_rows, weight_quantization, is_deterministic, has_bias):
    weight, bias = random_layer()
    linear = linear_packer(weight_quantization, is_deterministic)(weight, bias if has_bias else None)
    assert isinstance(linear, QuantisedLinear)
    assert linear.is_invariant == is_deterministic
    x = random_rows(num_rows)
    expected = x.double() @ linear.dequantised().double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(linear(x).double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_to_the_nearest(dtype):
    weight, _ = random_layer(dtype=dtype)
    before = weight.clone()
    int8, fp8 = (quantise_linear(weight, None, name, False) for name in ("int8", "fp8"))
    assert torch.equal(weight, before)
    # half a step, and a little for the rounding of the scale
    assert ((int8.dequantised() - weight).abs() <= 0.5001 * int8.scales[:, None]).all()
    # half of three bits behind the first, or half of the smallest step
    allowed = torch.maximum(weight.float().abs() / 16, 0.5001 * 2.0**-9 * fp8.scales[:, None])
    assert ((fp8.dequantised() - weight).abs() <= allowed).all()
    for linear in (int8, fp8):
        largest = linear.numbers.float().abs().amax(dim=1)
        assert torch.equal(largest, torch.full_like(largest, LARGEST[linear.numbers.dtype]))


@pytest.mark.parametrize("weight_quantization", QUANTISATIONS)
def test_an_output_of_zeros_is_zero(weight_quantization):
    weight, bias = random_layer()
    weight[3] = 0
    linear = linear_packer(weight_quantization, is_deterministic=False)(weight, bias)
    y = linear(random_rows(2))
    assert y.isfinite().all()
    assert torch.equal(y[:, 3], bias[3].expand(2))


@pytest.mark.parametrize("magnitude", [1e-45, 1e-42, 1e-38, 3e38])
@pytest.mark.parametrize("weight_quantization", QUANTISATIONS)
def test_outputs_of_any_size(weight_quantization, magnitude):
    """Scales below float32's normal numbers lose digits, and what comes of them is finite and about as large."""
    weight, _ = random_layer(dtype=torch.float32)
    weight = weight / weight.abs().amax() * magnitude
    dequantised = quantise_linear(weight, None, weight_quantization, False).dequantised()
    assert dequantised.isfinite().all()
    assert dequantised.abs().max() <= 1.5 * magnitude


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weight_quantization", QUANTISATIONS)
def test_weights_that_are_no_numbers_are_refused(weight_quantization, bad):
    weight, bias = random_layer()
    weight[5, 7] = bad
    message = f"weight_quantization: {weight_quantization} takes finite weights"
    with pytest.raises(ValueError, match=message):
        linear_packer(weight_quantization, is_deterministic=False)(weight, bias)


def test_other_dtypes_are_refused():
    weight, _ = random_layer(dtype=torch.float64)
    for name, is_deterministic in (("int8", False), ("fp8", True), ("none", True)):
        with pytest.raises(ValueError, match=r"float32, float16 or bfloat16, not torch\.float64"):
            linear_packer(name, is_deterministic)(weight, None)


def test_unknown_quantisation_is_refused():
    with pytest.raises(ValueError, match="must be one of none, int8, fp8, not int4"):
        linear_packer("int4", is_deterministic=False)


def test_the_error_is_the_weights():
    weight = torch.tensor([[127.0, 0.25], [0.0, 0.0]])
    linear = quantise_linear(weight, None, "int8", False)
    assert quantisation_error(weight, linear) == pytest.approx(0.25 / (127**2 + 0.25**2) ** 0.5)
    zeros = torch.zeros(3, 4)
    assert quantisation_error(zeros, quantise_linear(zeros, None, "int8", False)) == 0.0


@pytest.mark.parametrize(("weight_quantization", "lowest", "highest"), [("int8", 0.003, 0.012), ("fp8", 0.015, 0.035)])
def test_errors_of_normal_weights(weight_quantization, lowest, highest):
    """A step of an output of 1,024 normal weights is 3.3 / 127, its error that / sqrt(12); fp8 has three bits."""
    errors = QuantisationErrors(weight_quantization)
    pack = linear_packer(weight_quantization, False, errors)
    for out_features in (24, 32):
        pack(*random_layer(out_features, 1024))
    assert len(errors.of_layers) == 2
    assert all(lowest < error < highest for error in errors.of_layers)


def test_errors_are_one_line_of_the_log():
    errors = QuantisationErrors("int8", [0.002, 0.0043, 0.006])
    assert str(errors) == "weights int8: relative error 0.41% on average, 0.60% in the worst of 3 layers"
    assert str(QuantisationErrors("fp8")) == "weights fp8: no layers"
