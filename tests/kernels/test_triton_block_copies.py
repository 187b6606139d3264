"""Copies of cache blocks: the Triton kernels, in the interpreter, and torch's, both against plain indexing of bytes."""

import pytest
import torch

from noria.kernels.block_copies import (
    copy_blocks,
    copy_blocks_triton,
    gather_blocks,
    gather_blocks_triton,
    scatter_blocks,
    scatter_blocks_triton,
)

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
COPY = pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_triton])
MOVES = pytest.mark.parametrize(
    ("gather", "scatter"), [(gather_blocks, scatter_blocks), (gather_blocks_triton, scatter_blocks_triton)]
)
# a whole number of tiles, less and more than one, and pieces of one byte or of an odd number of them
BLOCK_SHAPES = pytest.mark.parametrize("block_shape", [(16, 3, 64), (2, 3, 4), (16, 68), (1,), (7, 3, 5), (17, 3, 43)])
NUM_BLOCKS = 6
# of the interpreter, about a loop whose length is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")


def random_bytes(*shape, dtype):
    """Of every pattern, NaN with payloads and subnormal numbers among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
@COPY
@BLOCK_SHAPES
@DTYPES
def test_copies_are_done_in_order(dtype, block_shape, copy):
    memory = random_bytes(3, 2, NUM_BLOCKS, *block_shape, dtype=dtype)
    # a chain, a block written twice, a swap that is none, and one upon itself
    copies = [(0, 1), (1, 2), (2, 5), (4, 2), (5, 4), (3, 3)]
    expected = memory.clone()
    for source, target in copies:
        expected[:, :, target] = expected[:, :, source].clone()
    sources, targets = torch.tensor(copies).T.contiguous()
    copy(memory, sources, targets)
    assert torch.equal(as_bytes(memory), as_bytes(expected))


@MOVES
@BLOCK_SHAPES
@DTYPES
def test_gather_and_scatter(dtype, block_shape, gather, scatter):
    memory = random_bytes(3, 2, NUM_BLOCKS, *block_shape, dtype=dtype)
    expected, blocks, others = memory.clone(), [4, 0, 3], [1, 4, 5]
    staging = gather(memory, torch.tensor(blocks))
    assert staging.shape == (3, 3, 2, *block_shape)
    assert staging.is_contiguous()
    for i, block in enumerate(blocks):
        assert torch.equal(as_bytes(staging[i]), as_bytes(memory[:, :, block]))
    scatter(memory, staging, torch.tensor(others))
    for i, block in enumerate(others):
        expected[:, :, block] = staging[i]
    assert torch.equal(as_bytes(memory), as_bytes(expected))


@MOVES
@COPY
def test_no_blocks(copy, gather, scatter):
    memory = random_bytes(2, 2, NUM_BLOCKS, 4, 5, dtype=torch.float16)
    before, nothing = memory.clone(), torch.empty(0, dtype=torch.int64)
    copy(memory, nothing, nothing)
    staging = gather(memory, nothing)
    assert staging.shape == (0, 2, 2, 4, 5)
    scatter(memory, staging, nothing)
    assert torch.equal(as_bytes(memory), as_bytes(before))


def test_memory_and_staging_that_start_anywhere():
    # in words of 8 bytes neither could be read: 3 layers of 5 bytes come before them
    whole, staging = random_bytes(4, 2, 5, 8, dtype=torch.int8), random_bytes(9, 2, 2, 8, dtype=torch.int8)
    memory = whole.view(-1)[3:-61].view(2, 2, 8, 8)
    piece = staging.view(-1)[5:69].view(2, 2, 2, 8)
    scatter_blocks_triton(memory, piece, torch.tensor([7, 2]))
    assert torch.equal(gather_blocks_triton(memory, torch.tensor([7, 2])), piece)
    copy_blocks_triton(memory, torch.tensor([2]), torch.tensor([0]))
    assert torch.equal(memory[:, :, 0], piece[1])


@pytest.mark.parametrize("block", [-1, -(2**40), NUM_BLOCKS, 2**40])
def test_a_block_out_of_range_is_left_out(block):
    memory = random_bytes(1, 2, NUM_BLOCKS, 4, dtype=torch.int8)
    expected = memory.clone()
    expected[:, :, 1] = memory[:, :, 0]
    copy_blocks_triton(memory, torch.tensor([block, 2, 0]), torch.tensor([2, block, 1]))
    assert torch.equal(memory, expected)
    staging = gather_blocks_triton(memory, torch.tensor([block, 1]))
    assert torch.equal(staging, torch.stack((torch.zeros_like(memory[:, :, 1]), memory[:, :, 1])))
    scatter_blocks_triton(memory, staging, torch.tensor([block, 3]))
    expected[:, :, 3] = memory[:, :, 1]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_debug_mode_names_a_block_out_of_range(block, capsys):
    memory = random_bytes(1, 2, NUM_BLOCKS, 4, dtype=torch.int8)
    good, bad = torch.tensor([1]), torch.tensor([block])
    launches = [
        lambda: copy_blocks_triton(memory, good, bad, is_debug=True),
        lambda: copy_blocks_triton(memory, bad, good, is_debug=True),
        lambda: gather_blocks_triton(memory, bad, is_debug=True),
        lambda: scatter_blocks_triton(memory, memory[:, :, :1].movedim(2, 0).contiguous(), bad, is_debug=True),
    ]
    for launch in launches:
        with pytest.raises(Exception, match="not below num_blocks"):
            launch()
        assert str(block) in capsys.readouterr().out.replace("[", " ").replace("]", " ").split()
    copy_blocks_triton(memory, good, good, is_debug=True)
    gather_blocks_triton(memory, good, is_debug=True)


def test_blocks_beyond_32_bits():
    """More bytes, moved one by one, than 32 bits can count; only what is written to takes memory."""
    num_blocks = 2**31 // 3 + 10
    memory = torch.empty(1, 2, num_blocks, 3, dtype=torch.int8)
    far, near = num_blocks - 1, 2
    memory[:, :, far] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    memory[:, :, near] = torch.tensor([[7, 8, 9], [10, 11, 12]])
    ids = torch.tensor([near, far])
    staging = gather_blocks_triton(memory, ids)
    assert staging.flatten().tolist() == [7, 8, 9, 10, 11, 12, 1, 2, 3, 4, 5, 6]
    scatter_blocks_triton(memory, staging, ids.flip(0))
    assert memory[0, :, far].flatten().tolist() == [7, 8, 9, 10, 11, 12]
    assert memory[0, :, near].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    copy_blocks_triton(memory, ids[:1], ids[1:])
    assert memory[0, :, far].flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda m, s, i: copy_blocks_triton(m[0], i, i), "memory must be"),
        (lambda m, s, i: copy_blocks_triton(m[:, :, ::2], i, i), "memory must be"),
        (lambda m, s, i: copy_blocks_triton(m, i.int(), i), "sources must be"),
        (lambda m, s, i: copy_blocks_triton(m, i, i[:1]), "targets must be"),
        (lambda m, s, i: gather_blocks_triton(m, i.float()), "blocks must be"),
        (lambda m, s, i: gather_blocks_triton(m, torch.stack((i, i), 1)[:, 0]), "blocks must be"),
        (lambda m, s, i: scatter_blocks_triton(m, s[:1], i), "staging must be"),
        (lambda m, s, i: scatter_blocks_triton(m, s.half(), i), "staging must be"),
        (lambda m, s, i: scatter_blocks_triton(m, s.transpose(0, 2), i), "staging must be"),
    ],
)
def test_arguments_that_no_kernel_takes(launch, message):
    with pytest.raises(ValueError, match=message):
        launch(torch.randn(2, 2, NUM_BLOCKS, 4), torch.randn(2, 2, 2, 4), torch.tensor([1, 2]))
