"""Keys in four bits by channel (key_groups) in tensors, and where a step has those of its own blocks whole.

A layer writes the step's keys whole, rounds from there the blocks that are full with them, and attends behind
that: to a query's own block whole, to those before it rounded. So a step is cut at the ends of blocks
(`RaggedBatch.by_block`), and each piece has one block of whole keys. The newest two blocks of a sequence stay
whole for the next step; of a step that computes more, those before them lie in memory that layers share one
after another.

Shape letters: N blocks, K kv heads, P block size, D key dim, E value dim, T rows of a step, V pieces of its
sequences, F blocks that are full, M blocks that are copied, B blocks of whole keys, R sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.ragged import RaggedBatch, ragged_ranges
from kernels.host import on_device
from kernels.paged_cache import four_bits, key_groups
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from kernels.paged_cache.memory import empty_on_huge_pages


@dataclass(frozen=True, kw_only=True)
class StepKeys:
    """Blocks of whole keys: numbers from 0 are of ChannelCache.recent, those behind them the step's own."""

    slots: Tensor  # [T] int64, block * P + place, where the keys of each row go
    rows: Tensor  # [V] int64, the block of each piece
    # Blocks of whole keys that are full, and blocks of the cache that they are rounded into [2, F] int64: the
    # last one of the cache stands for nothing.
    full: Tensor
    # What steps before have written, where it comes from and where this step has it [2, M] int64.
    moved: Tensor
    # Blocks of its own, and the rows of the step whose keys go to `recent` and to these; None: all to the
    # first.
    num_own: int = 0
    parts: tuple[Tensor, Tensor] | None = None
    # Of each piece: the sequence that it is of, and its block of whole keys [V]; empty in captured steps.
    owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    host_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _rooms: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, batch: RaggedBatch, recent_rows: NDArray[np.int64], num_recent: int, num_rows: int, device: Any
    ) -> tuple[RaggedBatch, StepKeys]:
        """The pieces of a step of `num_rows` rows, padding included, and where their keys are whole; its
        sequences have their newest keys from blocks `recent_rows` [S] on (kernels' Step), of `num_recent`.
        """
        cut, owners = batch.by_block()
        size, index = batch.block_size, (cut.context_lens - 1) // batch.block_size
        last = ((batch.context_lens - 1) // size)[owners]
        first = ((batch.context_lens - batch.query_lens) // size)[owners]
        kept = recent_rows[owners] ^ (index & 1)
        is_own = (last - first > 1) & (index < last - 1)
        rows = np.where(is_own, num_recent + np.cumsum(is_own) - 1, kept)
        arrays = _places(cut, index, (kept, rows), is_own, num_rows, nobodys=(num_recent - 1) * size)
        there = torch.split(on_device(np.concatenate(arrays), device), [each.size for each in arrays])
        return cut, cls(
            slots=there[0],
            rows=there[1],
            full=there[2].view(2, -1),
            moved=there[3].view(2, -1),
            num_own=int(is_own.sum()),
            parts=(there[4], there[5]) if is_own.any() else None,
            owners=owners,
            host_rows=rows,
        )

    def room(self, cache: ChannelCache, *, is_read_again: bool) -> Tensor:
        """The step's own blocks [B, K, P, D] for a layer, which those share that read their keys once."""
        assert cache.recent is not None, "it is there before steps are"
        shape = cache.recent.shape[1:]
        key = id(cache) if is_read_again else shape
        if key not in self._rooms:
            self._rooms[key] = cache.recent.new_empty(self.num_own, *shape)
        return self._rooms[key]


def _places(
    cut: RaggedBatch,
    index: NDArray[np.int64],
    blocks_of_keys: tuple[NDArray[np.int64], NDArray[np.int64]],
    is_own: NDArray[np.bool_],
    num_rows: int,
    *,
    nobodys: int,
) -> list[NDArray[np.int64]]:
    """Slots, rows, full and moved of StepKeys, and its parts, flat; of pieces in blocks `index` [V] of their
    tables, whose keys earlier steps and this one keep in these blocks. Rows that pad have the slot `nobodys`.
    """
    size, lens, (kept, rows) = cut.block_size, cut.query_lens, blocks_of_keys
    begins = (cut.context_lens - lens) % size
    slots = np.full(num_rows, nobodys, np.int64)
    slots[: lens.sum()] = np.repeat(rows, lens) * size + ragged_ranges(begins, lens)
    is_full, is_moved, is_own_row = (
        cut.context_lens % size == 0,
        is_own & (begins > 0),
        np.repeat(is_own, lens),
    )
    blocks = cut.block_tables[np.arange(index.size), index]
    full = np.concatenate((rows[is_full], blocks[is_full]))
    moved = np.concatenate((kept[is_moved], rows[is_moved]))
    return [slots, rows, full, moved, np.flatnonzero(~is_own_row), np.flatnonzero(is_own_row)]


class ChannelCache:
    """Keys by channel, values by token (four_bits), in four bits."""

    type_name = BY_CHANNEL
    shared_value_dim = 0

    def __init__(self, keys: Tensor, values: Tensor, scales: Tensor, channels: Tensor) -> None:
        self.keys = keys  # [N, K, P, D / 2] uint8
        self.values = values  # [N, K, P, E / 2] uint8
        self.scales = scales  # [N, K, P, 1] float32, of the value
        # Middle and half a step of each channel of a full block [N, K, 2, D] bfloat16.
        self.channels = channels
        # Whole keys of each sequence's newest two blocks [2 R + 2, K, P, D] bfloat16, the last two nobody's;
        # and those of the step that is computed, with the blocks of its own.
        self.recent: Tensor | None = None
        self.own: Tensor | None = None
        self.step: StepKeys | None = None
        self.block_size = keys.shape[2]
        self.in_windows = False

    @classmethod
    def allocate(cls, shape: tuple[int, ...], key_dim: int, value_dim: int, device: Any) -> ChannelCache:
        """Of blocks [N, K, P]."""
        assert value_dim, "values are not part of keys"
        assert shape[2] == KEY_GROUP, f"blocks of {shape[2]}"
        assert (key_dim | value_dim) % four_bits.GROUP == 0, f"vectors of {key_dim} and {value_dim}"
        return cls(
            empty_on_huge_pages((*shape, key_dim // 2), torch.uint8, device),
            empty_on_huge_pages((*shape, value_dim // 2), torch.uint8, device),
            empty_on_huge_pages((*shape, 1), torch.float32, device),
            empty_on_huge_pages((*shape[:2], 2, key_dim), torch.bfloat16, device),
        )

    def keep_newest_keys(self, num_sequences: int) -> None:
        """Room for the newest keys of so many sequences."""
        num_heads, block_size, num_bytes = self.keys.shape[1:]
        shape = (2 * num_sequences + 2, num_heads, block_size, 2 * num_bytes)
        self.recent = empty_on_huge_pages(shape, torch.bfloat16, self.keys.device)

    def begin(self, step: StepKeys, *, is_read_again: bool = False) -> None:
        """What is written and attended to next belongs to `step`."""
        self.step = step
        self.own = step.room(self, is_read_again=is_read_again) if step.num_own else None

    def write(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """See LayerCache."""
        assert values is not None, "values are not part of keys"
        block, offset = slots // self.block_size, slots % self.block_size
        self.values[block, :, offset], scale = four_bits.quantize(values)
        self.scales[block, :, offset] = scale[..., None]
        self.bring()
        self._put_whole(keys)
        self.close()

    def bring(self) -> None:
        """Copies what steps before have written of blocks that this step has for itself."""
        step, recent = self._in_step()
        if step.moved.shape[1]:
            assert self.own is not None, "it is moved there"
            self.own[step.moved[1] - recent.shape[0]] = recent[step.moved[0]]

    def _put_whole(self, keys: Tensor) -> None:
        """Keys [T, K, D] of the step."""
        (step, recent), size = self._in_step(), self.block_size
        keys = keys.to(recent.dtype)
        if step.parts is None:
            recent[step.slots // size, :, step.slots % size] = keys
            return
        assert self.own is not None, "some go there"
        for store, first, rows in zip((recent, self.own), (0, recent.shape[0]), step.parts, strict=True):
            slots = step.slots[rows]
            store[slots // size - first, :, slots % size] = keys[rows]

    def close(self) -> None:
        """Rounds the blocks that are full with the step."""
        step, _ = self._in_step()
        if step.full.shape[1]:
            self.put_keys(self.whole(step.full[0]), step.full[1])

    def put_keys(self, keys: Tensor, blocks: Tensor) -> None:
        """Rounds keys [B, K, P, D] of full blocks [B] by channel."""
        packed, middle, half = key_groups.quantize(keys)
        self.keys[blocks] = packed
        self.channels[blocks] = torch.stack((middle, half), 2)

    def whole(self, rows: Tensor) -> Tensor:
        """Whole keys [B, K, P, D] of blocks [B] as StepKeys counts them."""
        _, recent = self._in_step()
        if self.own is None:
            return recent[rows]
        num_recent = recent.shape[0]
        found, own = recent[rows.clamp(max=num_recent - 1)], self.own[(rows - num_recent).clamp(min=0)]
        return torch.where((rows < num_recent)[:, None, None, None], found, own)

    def whole_of_pieces(self, pieces: slice | Tensor) -> Tensor:
        """The same [V, K, P, D] of some pieces of the step's sequences, in float32."""
        step, _ = self._in_step()
        return self.whole(step.rows[pieces]).float()

    def whole_keys_of(self, sequence: int) -> Tensor:
        """Whole keys [K, B * P, D] of the blocks in which the step computes a sequence."""
        step, _ = self._in_step()
        rows = torch.from_numpy(step.host_rows[step.owners == sequence]).to(self.keys.device)
        return self.whole(rows).float().transpose(0, 1).flatten(1, 2)

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See LayerCache: keys as full blocks have them, whatever those that are not full hold."""
        shape = (blocks.shape[0], blocks.shape[1], *self.keys.shape[1:3], -1)
        flat = blocks.flatten()
        middle, half = self.channels[flat].float().unbind(2)
        keys = four_bits.levels_of(self.keys[flat]) * half[:, :, None] + middle[:, :, None]
        values = four_bits.dequantize(self.values[flat], self.scales[flat][..., 0])
        keys, values = (each.view(shape).transpose(1, 2).flatten(2, 3) for each in (keys, values))
        return keys, values

    def tensors(self) -> list[Tensor]:
        """See LayerCache."""
        return [self.keys, self.scales, self.values, self.channels]

    def by_slot(self) -> list[Tensor]:
        """Those whose third axis is slots of a block."""
        return [self.scales, self.values]

    def _in_step(self) -> tuple[StepKeys, Tensor]:
        assert self.step is not None, "a step has begun"
        assert self.recent is not None, "with room for its keys"
        return self.step, self.recent


def channel_caches(caches: Iterable[Any]) -> Iterator[ChannelCache]:
    """Those of layers, some of which have a state beside it; as often as layers read it."""
    for cache in caches:
        kept = cache if isinstance(cache, ChannelCache) else getattr(cache, "keys", None)
        if isinstance(kept, ChannelCache):
            yield kept


def begin_step(
    caches: Sequence[ChannelCache], batch: RaggedBatch, recent_rows: NDArray[np.int64] | None, slots: Tensor
) -> RaggedBatch:
    """What layers with these caches compute next is the step whose keys and values go to `slots` [T], of
    sequences whose newest keys are in `recent_rows` [S]; the step, cut at blocks.
    """
    recent = caches[0].recent
    assert recent is not None, "there is room for newest keys"
    assert recent_rows is not None, "and known where"
    cut, step = StepKeys.of(batch, recent_rows, recent.shape[0], slots.shape[0], slots.device)
    share_step(caches, step)
    return cut


def share_step(caches: Sequence[ChannelCache], step: StepKeys) -> None:
    """What layers with these caches compute next is `step`."""
    count = Counter(map(id, caches))
    for cache in caches:
        cache.begin(step, is_read_again=count[id(cache)] > 1)


def captured_keys(
    recent_rows: Tensor, positions: Tensor, blocks: Tensor, *, block_size: int, num_blocks: int
) -> StepKeys:
    """Of rows of one token each, at positions [T] in blocks [T] of a cache that has so many: by work on their
    device alone. The newest keys of their sequences are in blocks `recent_rows` [T].
    """
    within = positions % block_size
    rows = recent_rows ^ (positions // block_size & 1)
    filled = torch.where(within == block_size - 1, blocks, num_blocks - 1)
    return StepKeys(
        slots=rows * block_size + within,
        rows=rows,
        full=torch.stack((rows, filled)),
        moved=rows.new_empty(2, 0),
    )
