"""The matrix products in the Triton language, under its interpreter, against float64."""

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from noria.kernels import matmul as matmul_module
from noria.kernels.kv_format import LARGEST
from noria.kernels.matmul import DTYPES, matmul, matmul_triton
from noria.kernels.quantised_matmul import (
    few_rows_tile,
    many_rows_tile,
    num_splits,
    quantised_matmul,
    quantised_matmul_triton,
)

# bfloat16 is wrong in the interpreter
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}
# of sums in float32, against the sum of magnitudes
SUM_ROUNDING = 2.0**-20
# rows, outputs, inputs: numbers of rows, then sizes below, at and above those of tiles; 514 inputs are split in two
SIZES = [(num_rows, 33, 70) for num_rows in (1, 2, 15, 16, 17, 63, 64, 65, 130)]
SIZES += [(num_rows, *shape) for shape in ((1, 1), (7, 13), (64, 128), (130, 514)) for num_rows in (3, 17, 66)]
# a few of all sorts are fast enough for each run
EACH_SIZE = pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [
        pytest.param(*size, id="x".join(map(str, size)), marks=() if index % 5 == 1 else pytest.mark.slow)
        for index, size in enumerate(SIZES)
    ],
)
NUMBERS = [torch.int8, torch.float8_e4m3fn]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_numbers(out_features, in_features, dtype):
    weight = random(out_features, in_features, seed=1) * LARGEST[dtype] / 5
    numbers = weight.round() if dtype == torch.int8 else weight
    numbers = numbers.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return numbers, torch.rand(out_features, generator=torch.Generator().manual_seed(2)) + 0.01


def assert_close(actual, x, weight, bias):
    """weight: as it is, or dequantised, in float64."""
    expected = matmul(x.double(), weight.double(), None if bias is None else bias.double())
    magnitudes = matmul(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    allowed = ROUNDING[x.dtype] * expected.abs() + SUM_ROUNDING * magnitudes
    # half precision's smallest step
    allowed += 2.0**-24 if x.dtype == torch.float16 else 0
    # a comparison with NaN fails
    assert bool(((actual.double() - expected).abs() <= allowed).all())
    assert actual.dtype == x.dtype


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@EACH_SIZE
def test_matches_float64(num_rows, out_features, in_features, dtype):
    weight, bias = random(out_features, in_features, dtype=dtype, seed=1), random(out_features, dtype=dtype, seed=2)
    x = random(num_rows, in_features, dtype=dtype)
    assert_close(matmul_triton(x, weight), x, weight, None)
    assert_close(matmul_triton(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("numbers_dtype", NUMBERS, ids=str)
# float32 has the invariant product only
@pytest.mark.parametrize(
    ("dtype", "is_invariant"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)], ids=str
)
@EACH_SIZE
def test_quantised_matches_float64(num_rows, out_features, in_features, dtype, is_invariant, numbers_dtype):
    numbers, scales = random_numbers(out_features, in_features, numbers_dtype)
    # of a size whose products float16 holds
    x = (random(num_rows, in_features) / 16).to(dtype)
    bias = random(out_features, dtype=dtype, seed=2) if num_rows % 2 else None
    y = quantised_matmul_triton(x, numbers, scales, bias, is_invariant=is_invariant)
    assert_close(y, x, numbers.double() * scales.double()[:, None], bias)


# where few_rows_tile changes
@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "out_features"), [(3, 4099), (16, 8195)])
def test_outputs_in_the_wider_tiles(num_rows, out_features):
    numbers, scales = random_numbers(out_features, 40, torch.int8)
    x = random(num_rows, 40, dtype=torch.float16) / 16
    y = quantised_matmul_triton(x, numbers, scales)
    assert_close(y, x, numbers.double() * scales.double()[:, None], None)


@pytest.mark.parametrize("is_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_number_is_taken_as_it_is(dtype, is_invariant):
    """One row picks each number alone. float8_e4m3fn's zeros of either sign, subnormals and 448 too."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    numbers = codes[~codes.float().isnan()].view(-1, 1).repeat(1, 32)
    x = torch.zeros(2, 32, dtype=torch.float16)
    x[1, 17] = 1
    y = quantised_matmul_triton(x, numbers, torch.ones(len(numbers)), is_invariant=is_invariant)
    assert torch.equal(y[0], torch.zeros(len(numbers), dtype=torch.float16))
    assert torch.equal(y[1], numbers[:, 17].to(torch.float16))


@pytest.mark.parametrize("num_rows", [5, 20, 70])
def test_rows_of_a_wider_tensor(num_rows):
    wide = random(num_rows, 85, dtype=torch.float16)
    x = wide[:, 16:48]
    weight = random(24, 32, dtype=torch.float16, seed=1)
    numbers, scales = random_numbers(24, 32, torch.int8)
    assert torch.equal(matmul_triton(x, weight), matmul_triton(x.contiguous(), weight))
    for is_invariant in (False, True):
        expected = quantised_matmul_triton(x.contiguous(), numbers, scales, is_invariant=is_invariant)
        assert torch.equal(quantised_matmul_triton(x, numbers, scales, is_invariant=is_invariant), expected)


def test_no_rows():
    numbers, scales = random_numbers(8, 16, torch.int8)
    assert matmul_triton(random(0, 16), random(8, 16)).shape == (0, 8)
    for is_invariant in (False, True):
        assert quantised_matmul_triton(random(0, 16), numbers, scales, is_invariant=is_invariant).shape == (0, 8)


@pytest.mark.parametrize("num_rows", [9, 40, 130])
def test_what_is_no_number_stays_in_its_row(num_rows):
    """Also beside a tail of inputs and in the last row, where a tile is filled up."""
    x = random(num_rows, 70, dtype=torch.float16) / 16
    broken = x.clone()
    broken[num_rows // 2, 3], broken[-1, 69] = torch.nan, torch.inf
    is_sound = torch.ones(num_rows, dtype=torch.bool)
    is_sound[[num_rows // 2, -1]] = False
    weight = random(33, 70, dtype=torch.float16, seed=1)
    numbers, scales = random_numbers(33, 70, torch.int8)
    numbers[:, [3, 69]] = 1
    products = [
        lambda rows: matmul_triton(rows, weight),
        lambda rows: quantised_matmul_triton(rows, numbers, scales),
        lambda rows: quantised_matmul_triton(rows, numbers, scales, is_invariant=True),
    ]
    for product in products:
        y = product(broken)
        assert torch.equal(y[is_sound], product(x)[is_sound])
        assert not y[~is_sound].isfinite().any()


@pytest.fixture
def dot_in_order(monkeypatch):
    """tl.dot adds input after input, as a GPU's instruction adds alike in all rows of a tile.

    The interpreter's is a BLAS product, in which a row's last bits depend on where in the tile it stands.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[-1]):
            total += left[..., :, k : k + 1] * right[..., k : k + 1, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def twice(half, sign=1):
    """Inputs whose second half takes away again what the first adds: what is left is how each addition was rounded."""
    return torch.cat((half, sign * half), dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.usefixtures("dot_in_order")
def test_a_row_is_the_same_alone_among_others_and_elsewhere(dtype):
    x = twice(random(130, 75, dtype=dtype), -1)
    weight = twice(random(70, 75, dtype=dtype, seed=1))
    numbers, scales = random_numbers(70, 75, torch.int8)
    numbers = twice(numbers)
    products = [
        lambda rows: matmul_triton(rows, weight),
        lambda rows: quantised_matmul_triton(rows, numbers, scales, is_invariant=True),
    ]
    for product in products:
        whole = product(x)
        assert whole.count_nonzero() > 0.2 * whole.numel()
        for num_rows in (1, 2, 16, 17, 64, 65):
            assert torch.equal(product(x[:num_rows]), whole[:num_rows])
        for row in (63, 64, 129):
            assert torch.equal(product(x[row : row + 1])[0], whole[row])
        order = torch.randperm(130, generator=torch.Generator().manual_seed(3))
        assert torch.equal(product(x[order]), whole[order])


@pytest.mark.usefixtures("dot_in_order")
def test_another_order_of_additions_would_show():
    """The product that is not invariant differs, so that the test above can fail."""
    x = twice(random(130, 300, dtype=torch.float16), -1)
    numbers, scales = random_numbers(70, 300, torch.int8)
    numbers = twice(numbers)
    whole = quantised_matmul_triton(x, numbers, scales)
    for num_rows in (16, 17):
        assert not torch.equal(quantised_matmul_triton(x[:num_rows], numbers, scales), whole[:num_rows])


class Launches:
    """In the place of a kernel: what it was launched with."""

    def __init__(self):
        self.grids, self.constants = [], []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **constants: self.constants.append(constants)


@pytest.mark.parametrize("dtype", [*DTYPES, *NUMBERS], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(576, 1536), (4096, 4096), (28672, 4096), (49152, 576)])
def test_an_invariant_product_is_one_kernel_whatever_the_rows(monkeypatch, dtype, out_features, in_features):
    """The interpreter cannot show which instruction a GPU would take: that follows from these constants."""
    launches = Launches()
    monkeypatch.setattr(matmul_module, "matmul_kernel", launches)
    weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
    scales = torch.empty(out_features, device="meta")
    all_rows = (1, 8, 16, 17, 64, 65, 128, 1000)
    for num_rows in all_rows:
        if dtype in NUMBERS:
            x = torch.empty(num_rows, in_features, dtype=torch.bfloat16, device="meta")
            quantised_matmul_triton(x, weight, scales, is_invariant=True)
        else:
            matmul_triton(torch.empty(num_rows, in_features, dtype=dtype, device="meta"), weight)
    assert launches.constants == [launches.constants[0]] * len(all_rows)
    block_m = launches.constants[0]["BLOCK_M"]
    # one program a tile, and no splits
    assert [grid[0] for grid in launches.grids] == [-(-num_rows // block_m) for num_rows in all_rows]
    assert {grid[1:] for grid in launches.grids} == {(-(-out_features // launches.constants[0]["BLOCK_N"]), 1)}


# of Llama-3.1-8B and Llama-3.2-1B
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 64])
def test_few_rows_are_enough_programs(num_rows, out_features, in_features):
    if num_rows <= 16:
        tile, splits = few_rows_tile(num_rows, out_features), 1
    else:
        tile, splits = many_rows_tile(num_rows), num_splits(num_rows, in_features, out_features)
    assert num_rows <= tile.block_m
    assert splits * -(-out_features // tile.block_n) >= 128


def test_splits_have_inputs_enough():
    assert num_splits(64, 200, 128) == 1
    assert num_splits(64, 600, 128) == 2
    assert num_splits(64, 100_000, 128) == 8
    assert num_splits(65, 100_000, 128) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_splits_wanted", [2, 3, 8])
def test_splits_add_up(num_splits_wanted):
    """Of odd numbers of tiles: the last split is shorter."""
    in_features = 256 * num_splits_wanted + 100
    numbers, scales = random_numbers(130, in_features, torch.int8)
    assert num_splits(20, in_features, 130) == num_splits_wanted
    x, bias = random(20, in_features, dtype=torch.float16) / 16, random(130, dtype=torch.float16, seed=2)
    y = quantised_matmul_triton(x, numbers, scales, bias)
    assert_close(y, x, numbers.double() * scales.double()[:, None], bias)


def test_references():
    x, weight, bias = random(3, 20), random(5, 20, seed=1), random(5, seed=2)
    torch.testing.assert_close(matmul(x, weight, bias), x @ weight.T + bias)
    assert matmul(x.half(), weight.half()).dtype == torch.float16
    numbers, scales = random_numbers(5, 20, torch.float8_e4m3fn)
    expected = (x @ numbers.float().T) * scales + bias
    torch.testing.assert_close(quantised_matmul(x, numbers, scales, bias), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": random(2, 16).double()}, "x must be float32, float16 or bfloat16, not torch.float64"),
        ({"x": random(16)}, r"x must be \[rows, 16\]"),
        ({"x": random(2, 15)}, r"x must be \[rows, 16\]"),
        ({"x": random(16, 2).T}, r"x must be \[rows, 16\]"),
        ({"weight": random(16, 8).T}, "weight must be contiguous"),
        ({"weight": random(8, 16).half()}, "weight must be of x's dtype, torch.float32, not torch.float16"),
        ({"bias": random(7)}, r"bias must be contiguous \[8\] torch.float32, not \[7\]"),
        ({"bias": random(8).half()}, "bias must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"x": random(2, 16), "weight": random(8, 16), "bias": random(8)} | change
    with pytest.raises(ValueError, match=message):
        matmul_triton(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": torch.zeros(8, 16, dtype=torch.uint8)}, "numbers must be int8 or float8_e4m3fn, not torch.uint8"),
        ({"scales": torch.ones(7)}, r"scales must be contiguous \[8\] float32, not \[7\]"),
        ({"scales": torch.ones(8).half()}, r"scales must be contiguous \[8\] float32"),
        ({"x": random(2, 15)}, r"x must be \[rows, 16\]"),
    ],
)
def test_quantised_refuses_what_does_not_fit(change, message):
    numbers, scales = random_numbers(8, 16, torch.int8)
    with pytest.raises(ValueError, match=message):
        quantised_matmul_triton(**({"x": random(2, 16), "numbers": numbers, "scales": scales} | change))
