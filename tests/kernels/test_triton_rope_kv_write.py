"""The Triton kernels of the rotary embedding and the cache write, in the interpreter, for each kind of cache.

Not in bfloat16: the interpreter cuts it off where a GPU rounds it.
"""

import pytest
import torch

from noria.kernels.kv_format import LARGEST, SCALE_BYTES, SMALLEST, paged_kv, quantised
from noria.kernels.rope_kv_write import rope_kv_write, rope_kv_write_triton, rotation, rotation_triton

# of one rounding; in float32 of three more before it, and of cosines
TOLERANCES = {torch.float32: 5e-7, torch.float16: 5.2e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
QUANTISED = pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
POSITIONS = [0, 5, 1000, 131071]
SLOTS = [9, 2, 63, 16]
NUM_BLOCKS, BLOCK_SIZE = 4, 16


def inverse_frequencies(head_dim):
    return 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)


def random_qkv(num_tokens, num_heads, num_kv_heads, head_dim, dtype):
    """qk and v as the decoder has them: views of one tensor."""
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    return qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)


def empty_cache(num_kv_heads, head_dim, dtype, num_blocks=NUM_BLOCKS):
    """Full of what no test writes."""
    if dtype not in LARGEST:
        return torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, head_dim), 7.0, dtype=dtype)
    block_bytes = BLOCK_SIZE * num_kv_heads * (head_dim + SCALE_BYTES)
    return torch.full((num_blocks, block_bytes), 0x41, dtype=torch.uint8).view(dtype)


def turned(qk, positions, inv_freq):
    """In float64, of the angles that float32 holds."""
    angles = (torch.tensor(positions).float()[:, None] * inv_freq).double()[:, None]
    first, second = qk.double().chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def turned_in_float32(qk, turn):
    """To the last bit as the kernel does: it may not join products and sums."""
    first, second = qk.float().chunk(2, dim=-1)
    cos, sin = turn[:, None, 0], turn[:, None, 1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def at_slots(cache, slots, num_kv_heads, head_dim):
    """Numbers, those of one byte as uint8, and scales."""
    kv = paged_kv(cache, num_kv_heads, head_dim)
    block, offset = torch.tensor(slots) // BLOCK_SIZE, torch.tensor(slots) % BLOCK_SIZE
    if kv.scales is None:
        return kv.numbers[block, offset], None
    return kv.numbers.view(torch.uint8)[block, offset], kv.scales[block, offset]


def assert_quantised(cache, slots, x, kv_dtype):
    """That the cache holds x [slots, num_kv_heads, head_dim] as `quantised` gives it."""
    numbers, scales = at_slots(cache, slots, *x.shape[1:])
    expected_numbers, expected_scales = quantised(x, kv_dtype)
    assert torch.equal(numbers, expected_numbers.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


def assert_untouched(cache, slots, num_kv_heads, head_dim):
    """That all slots but `slots` hold what `empty_cache` put there."""
    others = [slot for slot in range(len(cache) * BLOCK_SIZE) if slot not in slots]
    poison = empty_cache(num_kv_heads, head_dim, cache.dtype, len(cache))
    numbers, scales = at_slots(cache, others, num_kv_heads, head_dim)
    expected_numbers, expected_scales = at_slots(poison, others, num_kv_heads, head_dim)
    assert torch.equal(numbers, expected_numbers)
    assert scales is None or torch.equal(scales, expected_scales)


def write_values(v, kv_dtype):
    """What the cache of `kv_dtype` holds of v [tokens, num_kv_heads, head_dim]: numbers and scales, token by token."""
    tokens, num_kv_heads, head_dim = v.shape
    caches = [empty_cache(num_kv_heads, head_dim, kv_dtype) for _ in "kv"]
    turn = rotation_triton(torch.zeros(tokens, dtype=torch.int64), inverse_frequencies(head_dim), v.dtype)
    rope_kv_write_triton(torch.cat((v, v), dim=1), v, turn, *caches, torch.arange(tokens))
    numbers, scales = at_slots(caches[1], range(tokens), num_kv_heads, head_dim)
    return numbers.view(kv_dtype), scales


@pytest.mark.parametrize("half", [1, 20, 64])
def test_rotation(half):
    positions = [0, 1, 2, 3, 4, 5, 6, 7, 100, 131071, 2**24 - 1]
    inv_freq = torch.cat((torch.ones(1), torch.rand(half - 1)))
    turn = rotation_triton(torch.tensor(positions), inv_freq, torch.float16)
    angles = (torch.tensor(positions).float()[:, None] * inv_freq).double()
    assert turn.dtype == torch.float32
    exact = torch.stack((angles.cos(), angles.sin()), dim=1)
    # half a unit in the last place, and what float64 loses in 2^24
    assert ((turn.double() - exact).abs() <= 2**-25 + 1e-8).all()


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (3, 1, 80), (2, 2, 96), (32, 8, 128), (16, 1, 128), (5, 5, 256), (1, 1, 2)],
)
def test_plain_cache(num_heads, num_kv_heads, head_dim, dtype):
    qk, v = random_qkv(4, num_heads, num_kv_heads, head_dim, dtype)
    before, inv_freq = qk.clone(), inverse_frequencies(head_dim)
    caches = [empty_cache(num_kv_heads, head_dim, dtype) for _ in "kv"]
    turn = rotation_triton(torch.tensor(POSITIONS), inv_freq, dtype)
    q = rope_kv_write_triton(qk, v, turn, *caches, torch.tensor(SLOTS))

    expected, tolerance = turned(qk, POSITIONS, inv_freq), TOLERANCES[dtype]
    keys, values = (cache.flatten(0, 1) for cache in caches)
    assert q.dtype == dtype
    assert q.is_contiguous()
    torch.testing.assert_close(q.double(), expected[:, :num_heads], rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(keys[SLOTS].double(), expected[:, num_heads:], rtol=tolerance, atol=1e-6)
    assert torch.equal(values[SLOTS], v)
    assert torch.equal(qk, before)
    for cache in caches:
        assert_untouched(cache, SLOTS, num_kv_heads, head_dim)


@pytest.mark.slow
@QUANTISED
@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 1, 80), (16, 8, 128), (4, 4, 256)])
def test_quantised_cache(num_heads, num_kv_heads, head_dim, dtype, kv_dtype):
    qk, v = random_qkv(4, num_heads, num_kv_heads, head_dim, dtype)
    caches = [empty_cache(num_kv_heads, head_dim, kv_dtype) for _ in "kv"]
    turn = rotation_triton(torch.tensor(POSITIONS), inverse_frequencies(head_dim), dtype)
    q = rope_kv_write_triton(qk, v, turn, *caches, torch.tensor(SLOTS))

    exact = turned_in_float32(qk, turn)
    assert torch.equal(q, exact[:, :num_heads].to(dtype))
    for cache, x in zip(caches, (exact[:, num_heads:], v), strict=True):
        assert_quantised(cache, SLOTS, x, kv_dtype)
        assert_untouched(cache, SLOTS, num_kv_heads, head_dim)


@QUANTISED
def test_torch_writes_quantised_caches_too(kv_dtype):
    qk, v = random_qkv(4, 9, 3, 64, torch.float32)
    positions, slots, inv_freq = torch.tensor(POSITIONS), torch.tensor(SLOTS), inverse_frequencies(64)
    ours, theirs = ([empty_cache(3, 64, kv_dtype) for _ in "kv"] for _ in range(2))
    rope_kv_write_triton(qk, v, rotation_triton(positions, inv_freq, qk.dtype), *ours, slots)
    rope_kv_write(qk, v, rotation(positions, inv_freq, qk.dtype), *theirs, slots)
    # keys are turned with other roundings: a number in a thousand may fall on the other side
    assert (ours[0].view(torch.uint8) != theirs[0].view(torch.uint8)).float().mean() < 1e-2
    assert torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8))


@QUANTISED
def test_quantised_numbers_are_the_nearest(kv_dtype):
    x = torch.randn(50, 3, 80) * torch.logspace(-20, 20, 50)[:, None, None]
    numbers, scales = quantised(x, kv_dtype)
    assert torch.equal(scales, x.abs().amax(-1) / LARGEST[kv_dtype])
    over_scale = x.double() / scales.double()[..., None]
    step = 1.0
    if kv_dtype == torch.float8_e4m3fn:
        # 3 bits of fraction, and none finer than 2^-9
        step = torch.exp2(over_scale.abs().log2().floor().clamp(min=-6) - 3)
    # the inverse of the scale is rounded too
    assert ((numbers.double() - over_scale).abs() <= step * 0.5 + 448 * 2e-7).all()


def test_every_float8_and_every_middle_between_two():
    floats = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (floats[1:] + floats[:-1]) / 2
    head = torch.cat((floats, middles, torch.tensor([1e-3, 7e-4, 448.0])))
    assert head.numel() == 256
    v = torch.stack((head, -head))[:, None]
    numbers, scales = write_values(v, torch.float8_e4m3fn)
    assert (scales == 1).all()
    assert torch.equal(numbers.view(torch.uint8), v.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_int8_and_every_middle_between_two():
    head = torch.cat((torch.arange(-127, 128) / 1.0, torch.zeros(1)))
    middles = torch.cat((torch.arange(-127, 127) + 0.5, torch.tensor([127.0, 0.0])))
    v = torch.stack((head, middles))[:, None]
    numbers, scales = write_values(v, torch.int8)
    assert (scales == 1).all()
    assert torch.equal(numbers, v.round().to(torch.int8))


@QUANTISED
def test_zeros_and_what_is_too_small_for_a_scale(kv_dtype):
    v = torch.zeros(3, 2, 64)
    v[1] = SMALLEST / 2
    v[2] = SMALLEST * 2
    numbers, scales = write_values(v, kv_dtype)
    assert (scales[:2] == 0).all()
    assert (numbers[:2].float() == 0).all()
    assert (numbers[2].float() == LARGEST[kv_dtype]).all()


@QUANTISED
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows(bad, kv_dtype):
    v = torch.randn(3, 2, 64)
    without = v.clone()
    without[1, 0] = 0.0
    v[1, 0, 40] = bad
    for numbers, scales in (write_values(v, kv_dtype), quantised(v, kv_dtype)):
        assert scales.isnan().nonzero().tolist() == [[1, 0]]
        expected_numbers, expected_scales = quantised(without, kv_dtype)
        assert torch.equal(numbers.view(torch.uint8), expected_numbers.view(torch.uint8))
        assert torch.equal(scales.nan_to_num(0.0), expected_scales)


def test_nan_of_a_plain_key_shows():
    qk, v = random_qkv(1, 1, 1, 64, torch.float32)
    qk[0, 1, 3] = torch.nan
    caches = [empty_cache(1, 64, torch.float32) for _ in "kv"]
    turn = rotation_triton(torch.tensor([3]), inverse_frequencies(64), v.dtype)
    assert not rope_kv_write_triton(qk, v, turn, *caches, torch.tensor([0])).isnan().any()
    assert caches[0][0, 0, 0].isnan().nonzero().flatten().tolist() == [3, 35]


@pytest.mark.parametrize("kv_dtype", [torch.float16, *LARGEST], ids=str)
def test_a_token_is_the_same_beside_any_others(kv_dtype):
    qk, v = random_qkv(4, 9, 3, 64, torch.float16)
    inv_freq = inverse_frequencies(64)
    results = []
    for groups in ([slice(0, 4)], [slice(i, i + 1) for i in range(4)]):
        caches = [empty_cache(3, 64, kv_dtype) for _ in "kv"]
        qs = []
        for group in groups:
            turn = rotation_triton(torch.tensor(POSITIONS[group]), inv_freq, v.dtype)
            qs.append(rope_kv_write_triton(qk[group], v[group], turn, *caches, torch.tensor(SLOTS[group])))
        results.append([torch.cat(qs), *(cache.view(torch.uint8) for cache in caches)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_padding_tokens_may_share_a_slot():
    qk, v = random_qkv(3, 2, 1, 64, torch.float32)
    caches = [empty_cache(1, 64, torch.float32) for _ in "kv"]
    turn = rotation_triton(torch.tensor([4, 0, 0]), inverse_frequencies(64), v.dtype)
    rope_kv_write_triton(qk, v, turn, *caches, torch.tensor([5, 63, 63]))
    assert torch.equal(caches[1].flatten(0, 1)[5], v[0])


@pytest.mark.parametrize("kv_dtype", [torch.float32, *LARGEST], ids=str)
def test_no_tokens(kv_dtype):
    qk, v = random_qkv(0, 2, 1, 64, torch.float32)
    caches = [empty_cache(1, 64, kv_dtype) for _ in "kv"]
    nothing = torch.empty(0, dtype=torch.int64)
    turn = rotation_triton(nothing, inverse_frequencies(64), v.dtype)
    assert rope_kv_write_triton(qk, v, turn, *caches, nothing).shape == (0, 2, 64)


@pytest.mark.parametrize("kv_dtype", [torch.float32, *LARGEST], ids=str)
@pytest.mark.parametrize("slot", [-1, -(2**40), NUM_BLOCKS * BLOCK_SIZE, 2**40])
def test_a_slot_out_of_range_writes_nothing(slot, kv_dtype):
    qk, v = random_qkv(2, 2, 1, 64, torch.float32)
    # a block more than the kernel knows of on both sides, so that what it may not write is there to be seen
    whole = [empty_cache(1, 64, kv_dtype, NUM_BLOCKS + 2) for _ in "kv"]
    caches = [cache[1:-1] for cache in whole]
    turn = rotation_triton(torch.tensor([4, 5]), inverse_frequencies(64), v.dtype)
    rope_kv_write_triton(qk, v, turn, *caches, torch.tensor([slot, 3]))
    for cache, x in zip(whole, (None, v), strict=True):
        assert_untouched(cache, [BLOCK_SIZE + 3], 1, 64)
        if x is not None and kv_dtype in LARGEST:
            assert_quantised(cache, [BLOCK_SIZE + 3], x[1:], kv_dtype)
        elif x is not None:
            assert torch.equal(cache[1, 3], x[1])


@pytest.mark.parametrize("slot", [-1, NUM_BLOCKS * BLOCK_SIZE])
def test_debug_mode_names_a_slot_out_of_range(slot, capsys):
    qk, v = random_qkv(2, 2, 1, 64, torch.float32)
    caches = [empty_cache(1, 64, torch.float32) for _ in "kv"]
    turn = rotation_triton(torch.tensor([4, 5]), inverse_frequencies(64), v.dtype)
    with pytest.raises(Exception, match="slot_mapping is negative or not below num_slots"):
        rope_kv_write_triton(qk, v, turn, *caches, torch.tensor([3, slot]), is_debug=True)
    assert f"slot_mapping: {slot}" in " ".join(capsys.readouterr().out.replace("[", " ").replace("]", " ").split())
    rope_kv_write_triton(qk, v, turn, *caches, torch.tensor([3, 0]), is_debug=True)


@pytest.mark.parametrize("kv_dtype", [torch.float16, *LARGEST], ids=str)
def test_slots_and_tokens_beyond_32_bits(kv_dtype):
    """Numbers of the cache, and of qkv, that 32 bits cannot count; only what is written to takes memory."""
    block = BLOCK_SIZE * 64
    block_bytes = BLOCK_SIZE * (64 + SCALE_BYTES)
    num_blocks = 2**31 // block + 3
    shape = (num_blocks, BLOCK_SIZE, 1, 64) if kv_dtype not in LARGEST else (num_blocks, block_bytes)
    caches = [torch.empty(shape, dtype=kv_dtype) for _ in "kv"]
    slots = [num_blocks * BLOCK_SIZE - 1, 1, 2**31 // 64]
    qkv = torch.empty(2**31 + 2**10, dtype=torch.float16).as_strided((3, 4, 64), (2**30 + 16, 64, 1))
    qkv[:] = torch.randn(3, 4, 64)
    qk, v = qkv.split((3, 1), dim=1)
    turn = rotation_triton(torch.tensor([1, 2, 3]), inverse_frequencies(64), v.dtype)
    q = rope_kv_write_triton(qk, v, turn, *caches, torch.tensor(slots))
    exact = turned_in_float32(qk, turn)
    assert torch.equal(q, exact[:, :2].half())
    for cache, x in zip(caches, (exact[:, 2:], v), strict=True):
        if kv_dtype in LARGEST:
            assert_quantised(cache, slots, x, kv_dtype)
        else:
            assert torch.equal(at_slots(cache, slots, 1, 64)[0], x.half())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qk", lambda x: x.half()),
        ("qk", lambda x: x[:1]),
        ("qk", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("v", lambda x: torch.cat((x, x), dim=-1)[..., ::2]),
        ("turn", lambda x: x[..., :-1]),
        ("turn", lambda x: x.half()),
        ("slot_mapping", lambda x: x.int()),
        ("slot_mapping", lambda x: x[:1]),
        ("k_cache", lambda x: x.half()),
        ("v_cache", lambda x: x[1:]),
    ],
)
def test_arguments_that_no_kernel_takes(name, change):
    qk, v = random_qkv(2, 2, 2, 64, torch.float32)
    arguments = {
        "qk": qk,
        "v": v,
        "turn": rotation_triton(torch.tensor([4, 5]), inverse_frequencies(64), v.dtype),
        "k_cache": empty_cache(2, 64, torch.float32),
        "v_cache": empty_cache(2, 64, torch.float32),
        "slot_mapping": torch.tensor([3, 4]),
    }
    arguments[name] = change(arguments[name])
    if name == "k_cache":
        arguments["v_cache"] = change(arguments["v_cache"])
    with pytest.raises(ValueError, match=f"{name} must be"):
        rope_kv_write_triton(**arguments)


def test_positions_that_no_kernel_takes():
    with pytest.raises(ValueError, match="positions must be"):
        rotation_triton(torch.tensor([1.0]), torch.ones(2), torch.float32)
    with pytest.raises(ValueError, match="inv_freq must be"):
        rotation_triton(torch.tensor([1]), torch.ones(2).double(), torch.float32)
