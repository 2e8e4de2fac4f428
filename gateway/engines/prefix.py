"""Which prefixes each engine holds, as far as its KV events have told.

Engines name blocks by the hashes of `contract.prefix`; the first 64 bits travel in events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contract.engines import BlocksStored, KvEvent
from contract.prefix import PrefixHasher, event_hash, is_sampled


class PromptHashes:
    """Event hashes of a prompt's full blocks, computed as far as somebody asks."""

    __slots__ = ("_block_size", "_hasher", "_hashes", "_token_ids")

    def __init__(
        self, token_ids: Sequence[int], *, model: str, adapter: str, salt: bytes, block_size: int
    ) -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._hasher = PrefixHasher(model=model, adapter=adapter, salt=salt, block_size=block_size)
        self._hashes: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Full blocks that a prefix hit may cover: the last token is always computed."""
        return max(len(self._token_ids) - 1, 0) // self._block_size

    def first_sampled(self, sample: int) -> int | None:
        """Hash of the first block that is known where one in `sample` is; None where the prompt has none."""
        return next((each for each in map(self.at, range(self.num_blocks)) if is_sampled(each, sample)), None)

    def at(self, index: int) -> int:
        """Hash of block `index`, which covers tokens up to (index + 1) * block_size."""
        if len(self._hashes) <= index:
            self._hasher.extend(self._token_ids, (index + 1) * self._block_size)
            self._hashes += map(event_hash, self._hasher.hashes[len(self._hashes) :])
        return self._hashes[index]


# Blocks of prompts on their way to an engine, before its events confirm them.
MAX_EXPECTED_BLOCKS = 65_536


class PrefixIndex:
    """The blocks that one engine holds, or is about to, because a prompt with them was sent there.

    An event that was missed costs a wrong guess, never a wrong answer. One in `sample` blocks is known: a
    prefix is taken to reach to the last of them.
    """

    __slots__ = ("_expected", "_held", "_sample")

    def __init__(self, sample: int = 1) -> None:
        self._sample = sample
        self._held: set[int] = set()
        # In the order of arrival, so that the oldest guess is forgotten first.
        self._expected: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Takes changes in their order."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._held.update(self._heard(event.block_hashes))
            else:
                self._held.difference_update(event.block_hashes)
                for block_hash in event.block_hashes:
                    self._expected.pop(block_hash, None)

    def _heard(self, hashes: Sequence[int]) -> Iterable[int]:
        # Engines of an older version tell of all.
        sample = self._sample
        return hashes if sample <= 1 else [each for each in hashes if is_sampled(each, sample)]

    def expect(self, hashes: PromptHashes) -> None:
        """A prompt is on its way: requests that share its prefix had better follow."""
        for index in range(hashes.num_blocks):
            block_hash = hashes.at(index)
            if block_hash not in self._held and is_sampled(block_hash, self._sample):
                self._expected[block_hash] = None
        while len(self._expected) > MAX_EXPECTED_BLOCKS:
            del self._expected[next(iter(self._expected))]

    def clear(self) -> None:
        """The engine was lost, and its cache with it."""
        self._held.clear()
        self._expected.clear()

    def num_cached_blocks(self, hashes: PromptHashes) -> int:
        """Leading blocks of a prompt that are held: one look-up each until the first that is not."""
        held, expected, sample = self._held, self._expected, self._sample
        num_cached = 0
        for index in range(hashes.num_blocks):
            block_hash = hashes.at(index)
            if sample > 1 and not is_sampled(block_hash, sample):
                continue
            if block_hash not in held and block_hash not in expected:
                break
            num_cached = index + 1
        return num_cached

    def holds(self, block_hash: int) -> bool:
        """Whether a block is held, or about to be."""
        return block_hash in self._held or block_hash in self._expected
