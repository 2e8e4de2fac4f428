"""How blocks of prompts are named: a chain of content hashes, the same in gateways and in all engines.

A hash stands for all tokens up to the end of its block, and the chain's root for model, adapter and cache
salt, so tenants with different salts never match. Hashes are 128 bits wide inside an engine, because a
collision would show one tenant the keys and values of another; routers get the first 64 bits, where a
collision costs a cache miss.

The standard library alone is used here, because vLLM's interpreter, which lacks the suite, imports this file.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes

_DIGEST_BYTES = 16


def root_hash(model: str, adapter: str, salt: bytes) -> BlockHash:
    """The start of a chain."""
    root = blake2b(digest_size=_DIGEST_BYTES, person=b"millrace-kv")
    for part in (model.encode(), adapter.encode(), salt):
        root.update(len(part).to_bytes(4, "little"))
        root.update(part)
    return root.digest()


def narrowed(salt: bytes, inner: str) -> bytes:
    """The salt of a part of what is cached under `salt`: whoever may read that part may not read the rest,
    and without `salt` nobody can make it.
    """
    part = blake2b(digest_size=_DIGEST_BYTES, person=b"millrace-salt")
    for each in (salt, inner.encode()):
        part.update(len(each).to_bytes(4, "little"))
        part.update(each)
    return part.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block behind `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def event_hash(block_hash: BlockHash) -> int:
    """The 64 bits of a hash that KV events carry; never 0, which means the start of a prompt."""
    return int.from_bytes(block_hash[:8], "little") or 1


def is_sampled(event_hash: int, sample: int) -> bool:
    """Whether a gateway that hears of one in `sample` blocks hears of this one. The hash itself says so:
    whoever has a prompt knows which of its blocks can be known.
    """
    return sample <= 1 or event_hash % sample == 0


class PrefixHasher:
    """Hashes full blocks of one chain, incrementally. `hashes[i]` covers tokens [0, (i + 1) * block_size)."""

    __slots__ = ("_block_size", "_most_tokens", "_root", "hashes")

    def __init__(
        self, *, model: str, adapter: str, salt: bytes, block_size: int, most_tokens: int | None = None
    ) -> None:
        """`most_tokens`: blocks that reach beyond it are not named: nobody else's have their contents."""
        self._block_size = block_size
        self._most_tokens = most_tokens
        self._root = root_hash(model, adapter, salt)
        self.hashes: list[BlockHash] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hashes every full block of the first `num_tokens` tokens that has no hash yet."""
        size, first = self._block_size, len(self.hashes)
        if self._most_tokens is not None:
            num_tokens = min(num_tokens, self._most_tokens)
        # At once: a long prompt has hundreds of blocks, and answers wait while it is hashed.
        tokens = array("I", token_ids[first * size : num_tokens // size * size])
        packed, num_bytes = tokens.tobytes(), size * tokens.itemsize
        parent = self.hashes[-1] if self.hashes else self._root
        for start in range(0, len(packed), num_bytes):
            content = parent + packed[start : start + num_bytes]
            parent = blake2b(content, digest_size=_DIGEST_BYTES).digest()
            self.hashes.append(parent)

    def copy(self) -> PrefixHasher:
        """The same chain, to go on differently."""
        copy = PrefixHasher.__new__(PrefixHasher)
        copy._block_size, copy._root, copy._most_tokens = self._block_size, self._root, self._most_tokens
        copy.hashes = list(self.hashes)
        return copy

    def parent_of(self, index: int) -> BlockHash | None:
        """Hash of the block before block `index`; None at the start."""
        return self.hashes[index - 1] if index else None
