"""Pieces of an arena, and that memory for which huge pages were asked has them where the system gives any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noria.kernels.huge_pages import PAGE_BYTES, Arena, advise_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_pieces_are_aligned_and_apart():
    arena = Arena(chunk_bytes=1000, alignment=64)
    # within a chunk, at its end, larger than one, empty, and after all of these
    pieces = [arena.empty(count, dtype) for count in (1, 3, 100, 5000, 0, 7) for dtype in (torch.int8, torch.float32)]
    for value, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(value)
    for value, piece in enumerate(pieces):
        assert (piece == value).all()
    assert [len(piece) for piece in pieces] == [1, 1, 3, 3, 100, 100, 5000, 5000, 0, 0, 7, 7]


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, 3 * PAGE_BYTES + 5])
def test_advice_leaves_memory_usable(num_bytes):
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    advise_huge_pages(memory)
    assert (memory.fill_(7) == 7).all()


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no huge pages")
def test_an_arena_has_huge_pages():
    piece = Arena(chunk_bytes=32 * PAGE_BYTES, alignment=64).empty(32 * PAGE_BYTES, torch.uint8).zero_()
    # the kernel's mark of memory that was advised
    assert "hg" in flags_at(piece.data_ptr())


def flags_at(address: int) -> list[str]:
    """Of the mapping that holds the address."""
    is_within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if "-" in name:
            begin, end = (int(number, 16) for number in name.split("-"))
            is_within = begin <= address < end
        elif name == "VmFlags:" and is_within:
            return words
    raise AssertionError(f"{address:x} is not mapped")
