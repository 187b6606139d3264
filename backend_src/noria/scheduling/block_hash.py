"""The key of the prefix index: a hash over all tokens up to the end of a block, so that equal keys mean equal contents.

A chain: each block's hash covers its parent's. SHA-256, because a key that can be made to collide would show one
client's cached context to another (CVE-2025-25183).
"""

from __future__ import annotations

import hashlib
from array import array

from noria.sequence import Sequence


def root_hash(salt: str) -> bytes:
    """The parent of a first block. Requests of different salt have no block in common."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """32 bytes. token_ids: the block's own, full."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_hashes(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Makes `sequence.block_hashes` cover its first `num_blocks` blocks, whose tokens are all known."""
    hashes = sequence.block_hashes
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else root_hash(sequence.request.params.cache_salt)
        hashes.append(block_hash(parent, sequence.token_ids[index * block_size : (index + 1) * block_size]))
