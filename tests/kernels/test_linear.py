import pytest
import torch

from noria.kernels.linear import PackedLinear, PlainLinear, pack_linear


def random_layer(out_features, in_features, dtype=torch.float32):
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    return weight, torch.randn(out_features, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 8, 17, 130, 4096])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (7, 13), (1, 1)])
def test_matches_float64(out_features, in_features, num_rows, has_bias):
    weight, bias = random_layer(out_features, in_features)
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    actual = pack_linear(weight, bias if has_bias else None)(x)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_takes_rows_of_a_wider_tensor():
    weight, bias = random_layer(24, 16)
    x = torch.randn(5, 48)
    torch.testing.assert_close(pack_linear(weight, bias)(x[:, 16:32]), x[:, 16:32] @ weight.T + bias)


def test_packed_rows_do_not_change_with_the_number_of_rows():
    weight, bias = random_layer(576, 192)
    layer = pack_linear(weight, bias)
    if not isinstance(layer, PackedLinear):
        pytest.skip("torch was built without oneDNN")
    x = torch.randn(512, 192)
    whole = layer(x)
    for num_rows in (1, 2, 5, 8, 9, 33, 128):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_stay_plain(dtype):
    weight, bias = random_layer(6, 10, dtype)
    x = torch.randn(3, 10).to(dtype)
    layer = pack_linear(weight, bias)
    assert isinstance(layer, PlainLinear)
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T + bias.double(), rtol=0.02, atol=0.05)


def test_stays_plain_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, bias = random_layer(6, 10)
    layer = pack_linear(weight, bias)
    assert isinstance(layer, PlainLinear)
    x = torch.randn(3, 10)
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
