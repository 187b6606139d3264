"""Copies of whole blocks of the KV cache, byte for byte: within it, out of it into one piece, and back.

    copy_blocks     memory[:, :, targets[i]] = memory[:, :, sources[i]], one i after the other
    gather_blocks   staging[i] = memory[:, :, blocks[i]]
    scatter_blocks  memory[:, :, blocks[i]] = staging[i]

memory [num_layers, 2, num_blocks, ...] and staging [n, num_layers, 2, ...], contiguous, of any dtype; ids [n] int64.
A block of memory is 2 * num_layers pieces far from each other; one of staging is whole, as a copy engine wants it.
Knows nothing of what a block holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noria.kernels.language import IS_DEBUG, tl, triton

# bytes that one program moves at once: 64 for each thread
_COPY_BYTES, _COPY_WARPS = 2048, 1
_MOVE_BYTES, _MOVE_WARPS = 8192, 4


@triton.jit(do_not_specialize=["n"])
def _copy_blocks_kernel(
    memory_ptr: tl.tensor,  # [pieces, num_blocks, PIECE] words
    sources_ptr: tl.tensor,  # [n]
    targets_ptr: tl.tensor,  # [n]
    n: tl.tensor,
    num_blocks: tl.tensor,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEBUG: tl.constexpr,
) -> None:
    """One program copies the same words of a piece for every i, so that programs need not wait for each other."""
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece_ptrs = memory_ptr + tl.program_id(0).to(tl.int64) * num_blocks * PIECE + words
    for i in range(n):
        source = tl.load(sources_ptr + i)
        target = tl.load(targets_ptr + i)
        is_in_range = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)
        if DEBUG:
            if (source < 0) | (source >= num_blocks) | (target < 0) | (target >= num_blocks):
                tl.device_print("copy_blocks: out of range, source or target:", source, target)
            assert is_in_range, "copy_blocks: a source or target is negative or not below num_blocks"
        mask = (words < PIECE) & is_in_range
        tl.store(piece_ptrs + target * PIECE, tl.load(piece_ptrs + source * PIECE, mask), mask)
        # a block that was just written may be the next source
        tl.debug_barrier()


@triton.jit
def _move_blocks_kernel(
    memory_ptr: tl.tensor,  # [pieces, num_blocks, PIECE] words
    staging_ptr: tl.tensor,  # [n, pieces, PIECE]
    blocks_ptr: tl.tensor,  # [n]
    num_blocks: tl.tensor,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GATHER: tl.constexpr,
    DEBUG: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(blocks_ptr + i)
    is_in_range = (block >= 0) & (block < num_blocks)
    if DEBUG:
        if (block < 0) | (block >= num_blocks):
            tl.device_print("gather_blocks or scatter_blocks: out of range in blocks:", block)
        assert is_in_range, "gather_blocks or scatter_blocks: a block is negative or not below num_blocks"
    memory_ptrs = memory_ptr + (piece * num_blocks + block) * PIECE + words
    staging_ptrs = staging_ptr + (i * tl.num_programs(1) + piece) * PIECE + words
    if IS_GATHER:
        tl.store(staging_ptrs, tl.load(memory_ptrs, (words < PIECE) & is_in_range, other=0), words < PIECE)
    else:
        tl.store(memory_ptrs, tl.load(staging_ptrs, words < PIECE), (words < PIECE) & is_in_range)


def copy_blocks_triton(memory: Tensor, sources: Tensor, targets: Tensor, is_debug: bool = IS_DEBUG) -> None:
    """One launch. Any sources and targets will do, chains and repeated targets included: copies are done in order.

    A copy from or to a block that is not there is printed and stops the GPU's context where is_debug is set; else it is
    left out. Raises ValueError for shapes, dtypes and memory that is not contiguous.
    """
    words = _words(memory)
    _check_ids("sources", sources, len(sources))
    _check_ids("targets", targets, len(sources))
    num_pieces, num_blocks, piece = words.shape
    if words.numel() == 0 or len(sources) == 0:
        return
    tile = min(_COPY_BYTES // words.itemsize, triton.next_power_of_2(piece))
    _copy_blocks_kernel[(num_pieces, triton.cdiv(piece, tile))](
        words,
        sources,
        targets,
        len(sources),
        num_blocks,
        PIECE=piece,
        BLOCK=tile,
        DEBUG=is_debug,
        num_warps=_COPY_WARPS,
        # no load runs ahead of the store before it
        num_stages=1,
        debug=is_debug,
    )


def gather_blocks_triton(memory: Tensor, blocks: Tensor, is_debug: bool = IS_DEBUG) -> Tensor:
    """A new staging, in one launch. A block that is not there gives zeros, or else what `copy_blocks_triton` says."""
    staging = memory.new_empty(len(blocks), *memory.shape[:2], *memory.shape[3:])
    _move(memory, staging, blocks, True, is_debug)
    return staging


def scatter_blocks_triton(memory: Tensor, staging: Tensor, blocks: Tensor, is_debug: bool = IS_DEBUG) -> None:
    """One launch. Blocks must differ: which of two writers of a block is the last, none can say, nor is it checked.

    A block that is not there is treated as in `copy_blocks_triton`.
    """
    _move(memory, staging, blocks, False, is_debug)


def _move(memory: Tensor, staging: Tensor, blocks: Tensor, is_gather: bool, is_debug: bool) -> None:
    _check_staging(memory, staging, len(blocks))
    words = _words(memory, staging)
    _check_ids("blocks", blocks, len(blocks))
    num_pieces, num_blocks, piece = words.shape
    if staging.numel() == 0:
        return
    tile = min(_MOVE_BYTES // words.itemsize, triton.next_power_of_2(piece))
    _move_blocks_kernel[(len(blocks), num_pieces, triton.cdiv(piece, tile))](
        words,
        staging.view(len(blocks), num_pieces, -1).view(words.dtype),
        blocks,
        num_blocks,
        PIECE=piece,
        BLOCK=tile,
        IS_GATHER=is_gather,
        DEBUG=is_debug,
        num_warps=_MOVE_WARPS,
        debug=is_debug,
    )


def _words(memory: Tensor, staging: Tensor | None = None) -> Tensor:
    """[num_layers * 2, num_blocks, words of a piece], integers as wide as divide a piece and where memory starts."""
    if memory.dim() < 4 or memory.shape[1] != 2 or not memory.is_contiguous():
        raise ValueError(
            "memory must be contiguous [num_layers, 2, num_blocks, ...], "
            f"not {list(memory.shape)} with strides {memory.stride()}"
        )
    piece_bytes = math.prod(memory.shape[3:]) * memory.itemsize
    starts = [memory.storage_offset(), 0 if staging is None else staging.storage_offset()]
    unit = math.gcd(piece_bytes, *(int(start) * memory.itemsize for start in starts))
    word = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if unit % w.itemsize == 0)
    return memory.view(-1, memory.shape[2], piece_bytes // memory.itemsize).view(word)


def _check_staging(memory: Tensor, staging: Tensor, n: int) -> None:
    shape = (n, *memory.shape[:2], *memory.shape[3:])
    if staging.shape != shape or staging.dtype != memory.dtype or not staging.is_contiguous():
        raise ValueError(
            f"staging must be contiguous {memory.dtype} {list(shape)} beside memory {list(memory.shape)}, "
            f"not {staging.dtype} {list(staging.shape)} with strides {staging.stride()}"
        )


def _check_ids(name: str, ids: Tensor, n: int) -> None:
    if ids.shape != (n,) or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(f"{name} must be contiguous int64 [{n}], not {ids.dtype} {list(ids.shape)}")


def copy_blocks(memory: Tensor, sources: Tensor, targets: Tensor) -> None:
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        memory[:, :, target].copy_(memory[:, :, source])


def gather_blocks(memory: Tensor, blocks: Tensor) -> Tensor:
    """A new staging."""
    staging = memory.new_empty(len(blocks), *memory.shape[:2], *memory.shape[3:])
    for i, block in enumerate(blocks.tolist()):
        staging[i].copy_(memory[:, :, block])
    return staging


def scatter_blocks(memory: Tensor, staging: Tensor, blocks: Tensor) -> None:
    """Blocks must differ."""
    for i, block in enumerate(blocks.tolist()):
        memory[:, :, block].copy_(staging[i])
