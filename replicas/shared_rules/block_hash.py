"""Chain hashes of token blocks: the key of the prefix cache and of prefix-aware routing.

A block's hash covers its own tokens and, through its parent's hash, all tokens before them. So equal hashes mean equal
prefixes. Ingress and engine compute the same hashes. A salt is a part of all hashes of a sequence: sequences with
different salts share no block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_ROOT = b"\x00" * 16


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None = None) -> None:
    """Append to `hashes` the 16-byte chain hash of each full block of `token_ids` that it does not cover yet."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else _root(salt)
        block = array("q", token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest())


def _root(salt: str | None) -> bytes:
    """Return the parent hash of a sequence's first block."""
    return _ROOT if salt is None else hashlib.blake2b(salt.encode(), digest_size=16).digest()
