"""Keys by channel: what the native ops write and attend to is what the reference says, and a row's bits do
not depend on the steps by which its history came.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.native_ops import AttentionArgs, AttentionPlanArgs, NativeAttentionPlan
from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.tiled import TiledAttention
from kernels.host import address_of
from kernels.native.library import NativeLibrary, Op, StepStruct
from kernels.paged_cache import four_bits, key_groups
from kernels.paged_cache.channel_cache import ChannelCache, begin_step
from kernels.paged_cache.host import KEY_GROUP, HostCache, allocate_host_layer
from kernels.paged_cache.native import describe, key_group_ops
from kernels.paged_cache.store import allocate_layer
from kernels.rope.native import RopeCacheArgs
from tests.kernels.attention import assert_near_codes
from tests.kernels.native.conftest import PRODUCT_LEVELS

# Query heads, kv heads, size of a head.
HEADS = [(4, 2, 64), (4, 4, 16), (16, 8, 128), (7, 1, 96), (6, 2, 80)]
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 90}, "soft cap": {"soft_cap": 2.0}}
# Positions [start, end) of a sequence.
Span = tuple[int, int, int]


@dataclass(kw_only=True)
class Texts:
    """Sequences whose queries, keys and values are known, and a cache of some of them, which holds NaN."""

    library: NativeLibrary
    heads: tuple[int, int, int]
    lengths: list[int]
    cache: HostCache
    rows: list[np.ndarray]  # of each [L, (H + 2 K) D], not rotated: there is no angle
    tables: np.ndarray
    options: dict[str, Any]

    @classmethod
    def draw(
        cls, library: NativeLibrary, lengths: list[int], heads: tuple[int, int, int], **options: Any
    ) -> Texts:
        num_heads, num_kv, dim = heads
        drawn = np.random.default_rng(sum(lengths))
        counts = [-(-length // KEY_GROUP) for length in lengths]
        cache = allocate_host_layer(
            num_blocks=sum(counts) + 1,
            block_size=KEY_GROUP,
            num_heads=num_kv,
            key_dim=dim,
            value_dim=dim,
            shared_value_dim=0,
            type_name="kivi4",
        )
        cache.keep_newest_keys(len(lengths) + 1)
        for part in (*cache.tensors(), cache.recent):
            assert part is not None
            part.view(np.uint8)[...] = 0xFF
        shuffled = drawn.permutation(sum(counts))
        tables = np.zeros((len(lengths), max(counts)), np.int64)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            tables[row, :count] = shuffled[end - count : end]
        width = (num_heads + 2 * num_kv) * dim
        rows = [drawn.standard_normal((length, width), np.float32) for length in lengths]
        for each in rows:
            # Some channels of keys lie far from zero.
            each[:, num_heads * dim : (num_heads + num_kv) * dim : 5] += 8
        return cls(
            library=library,
            heads=heads,
            lengths=lengths,
            cache=cache,
            rows=rows,
            tables=tables,
            options=options,
        )

    def run(self, spans: Iterable[Span]) -> list[Tensor]:
        """One step of these spans: what attention gives each, [T, H, D]."""
        spans = list(spans)
        num_heads, num_kv, dim = self.heads
        qkv = np.concatenate([self.rows[which][start:end] for which, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        slots = np.concatenate(
            [
                self.tables[which][np.arange(start, end) // KEY_GROUP] * KEY_GROUP
                + np.arange(start, end) % KEY_GROUP
                for which, start, end in spans
            ]
        )
        starts = np.cumsum([0, *(end - start for _, start, end in spans)])
        lens = np.array([end for *_, end in spans])
        tables = np.ascontiguousarray(self.tables[[which for which, *_ in spans]])
        # The second one's odd blocks come first, as where a table has left one out.
        rows = np.array([2 * which + which % 2 for which, *_ in spans])
        step = StepStruct(
            num_tokens=len(qkv),
            num_sequences=len(spans),
            max_blocks=tables.shape[1],
            positions=positions.ctypes.data,
            slots=slots.ctypes.data,
            query_starts=starts.ctypes.data,
            context_lens=lens.ctypes.data,
            block_tables=tables.ctypes.data,
            recent_rows=rows.ctypes.data,
        )
        out = np.full((len(qkv), num_heads, dim), np.nan, np.float32)
        angles = np.zeros((max(self.lengths), 0), np.float32)
        plan = NativeAttentionPlan(
            self.library, num_heads=num_heads, num_kv_heads=num_kv, value_dim=dim, block_size=KEY_GROUP
        )
        at, cache = ctypes.addressof(step), describe(self.cache)
        write = RopeCacheArgs(
            step=at,
            qkv=address_of(qkv),
            cos=address_of(angles),
            sin=address_of(angles),
            cache=cache,
            num_heads=num_heads,
            qkv_stride=qkv.shape[1],
            stores=1,
        )
        keys = qkv[:, num_heads * dim :]
        args = AttentionArgs(
            step=at,
            plan=plan.address,
            q=address_of(qkv),
            k=address_of(keys),
            out=address_of(out),
            cache=cache,
            num_heads=num_heads,
            q_stride=qkv.shape[1],
            k_stride=qkv.shape[1],
            out_stride=num_heads * dim,
            window=self.options.get("window", 0),
            scale=dim**-0.5,
            soft_cap=self.options.get("soft_cap", 0.0),
        )
        close, keep = key_group_ops(self.library, at, self.cache, keys)
        ops = [
            Op(self.library, "rope_cache", write),
            Op(self.library, "attention_plan", AttentionPlanArgs(at, plan.address, 0), plan),
            *close,
            Op(self.library, "attention", args),
            *keep,
        ]
        self.library.run(ops, num_threads=2)
        found = torch.from_numpy(out)
        return list(found.split(np.diff(starts).tolist()))

    def parts(self, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [L, H, D], keys in bfloat16 and values [L, K, D] of a sequence."""
        num_heads, num_kv, dim = self.heads
        rows = torch.from_numpy(self.rows[which])
        q, k, v = rows.split([num_heads * dim, num_kv * dim, num_kv * dim], 1)
        return (
            q.unflatten(1, (num_heads, dim)),
            k.unflatten(1, (num_kv, dim)).bfloat16().float(),
            v.unflatten(1, (num_kv, dim)),
        )

    def expected(self, which: int) -> Tensor:
        """By the formula, from keys that the reference rounds: [L, H, D]."""
        q, keys, values = self.parts(which)
        length, group = len(q), q.shape[1] // keys.shape[1]
        rounded = keys.clone()
        for start in range(0, length - KEY_GROUP + 1, KEY_GROUP):
            block = keys[start : start + KEY_GROUP].transpose(0, 1)
            found = key_groups.dequantize(*key_groups.quantize(block))
            rounded[start : start + KEY_GROUP] = found.transpose(0, 1)
        seen = four_bits.dequantize(*four_bits.quantize(values))
        keys, rounded, seen = (each.repeat_interleave(group, 1) for each in (keys, rounded, seen))
        at = torch.arange(length)
        is_own = (at // KEY_GROUP)[:, None] == at // KEY_GROUP
        scores = torch.where(
            is_own, torch.einsum("qhd,khd->hqk", q, keys), torch.einsum("qhd,khd->hqk", q, rounded)
        )
        scores = scores * q.shape[2] ** -0.5
        if cap := self.options.get("soft_cap"):
            scores = cap * torch.tanh(scores / cap)
        hidden = at > at[:, None]
        if window := self.options.get("window"):
            hidden |= at <= at[:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, seen)


@pytest.mark.parametrize("product_level", PRODUCT_LEVELS, indirect=True, scope="function")
@pytest.mark.parametrize("named", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_is_what_the_reference_says(
    product_level: NativeLibrary, heads: tuple[int, int, int], named: str
) -> None:
    """Whole prompts; then, of the same, keys as they are stored."""
    texts = Texts.draw(product_level, [300, 63, 64, 65, 1], heads, **OPTIONS[named])
    found = texts.run((which, 0, length) for which, length in enumerate(texts.lengths))
    for which, rows in enumerate(found):
        torch.testing.assert_close(rows, texts.expected(which), atol=2e-4, rtol=1e-4)
    _, keys, _ = texts.parts(0)
    blocks = keys[:256].unflatten(0, (4, KEY_GROUP)).transpose(1, 2)
    stored = torch.from_numpy(texts.cache.wide_keys(texts.tables[0, :4]))
    torch.testing.assert_close(
        stored, key_groups.dequantize(*key_groups.quantize(blocks)), atol=1e-5, rtol=1e-5
    )


def as_torch(texts: Texts, spans: list[Span], cache: ChannelCache, kind: Any) -> list[Tensor]:
    """What a back end of torch gives for a step, of which it writes the keys and values."""
    ends, lens = np.array([end for *_, end in spans]), np.array([end - start for _, start, end in spans])
    batch = RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(lens))),
        context_lens=ends,
        block_tables=texts.tables[[which for which, *_ in spans]],
        block_size=KEY_GROUP,
    )
    parts = [[part[start:end] for part in texts.parts(which)] for which, start, end in spans]
    q, keys, values = (torch.cat(part) for part in zip(*parts, strict=True))
    at = [(which, place) for which, start, end in spans for place in range(start, end)]
    slots = torch.tensor(
        [int(texts.tables[which, place // KEY_GROUP]) * KEY_GROUP + place % KEY_GROUP for which, place in at]
    )
    recent_rows = np.array([2 * which + which % 2 for which, *_ in spans])
    cut = begin_step([cache], batch, recent_rows, slots)
    cache.write(keys, values, slots)
    num_heads, num_kv, dim = texts.heads
    options = AttentionOptions(
        scale=dim**-0.5, window=texts.options.get("window"), soft_cap=texts.options.get("soft_cap")
    )
    backend = kind(num_heads=num_heads, num_kv_heads=num_kv)
    found: Tensor = backend.run(backend.plan(cut, q.device), q, cache, options)
    return list(found.split(lens.tolist()))


@pytest.mark.parametrize("kind", [ReferenceAttention, TiledAttention])
@pytest.mark.parametrize("named", OPTIONS)
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[3]])
def test_torch_stores_and_attends_as_the_native_kernels(
    native: NativeLibrary, heads: tuple[int, int, int], named: str, kind: Any
) -> None:
    """In steps that leave blocks, fill some and compute many; drafts that are rejected among them."""
    lengths = [330, 200, 65]
    texts = Texts.draw(native, lengths, heads, **OPTIONS[named])
    num_blocks = texts.cache.keys.shape[0] - 1
    shape = {"num_blocks": num_blocks, "block_size": KEY_GROUP, "num_heads": heads[1]}
    cache = allocate_layer(
        **shape,
        key_dim=heads[2],
        value_dim=heads[2],
        shared_value_dim=0,
        dtype="kivi4",
        device=torch.device("cpu"),
    )
    assert isinstance(cache, ChannelCache)
    cache.keep_newest_keys(len(lengths) + 1)
    for part in (*cache.tensors(), cache.recent):
        assert part is not None
        part.view(torch.uint8).fill_(0xFF)
    steps: list[list[Span]] = [
        [(0, 0, 30), (1, 0, 130), (2, 0, 63)],
        [(0, 30, 300), (1, 130, 131), (2, 63, 64)],
        # Of the first 8, 3 stay.
        [(0, 300, 308), (1, 131, 190), (2, 64, 65)],
        [(0, 303, 330), (1, 190, 200)],
    ]
    for spans in steps:
        for one, other in zip(texts.run(spans), as_torch(texts, spans, cache, kind), strict=True):
            torch.testing.assert_close(other, one, atol=5e-4, rtol=1e-3)
    for which, length in enumerate(lengths):
        full, blocks = (
            texts.tables[which, : length // KEY_GROUP],
            texts.tables[which, : -(-length // KEY_GROUP)],
        )
        assert texts.cache.channels is not None
        channels = torch.from_numpy(texts.cache.channels[full]).view(torch.bfloat16)
        assert torch.equal(cache.channels[full], channels)
        assert torch.equal(cache.keys[full], torch.from_numpy(texts.cache.keys[full]))
        values, scales = (
            part[blocks].swapaxes(1, 2).reshape(-1, heads[1], part.shape[3])[:length]
            for part in (np.asarray(texts.cache.values), np.asarray(texts.cache.scales))
        )
        ours = [part[blocks].transpose(1, 2).flatten(0, 1)[:length] for part in (cache.values, cache.scales)]
        assert_near_codes(ours[0], torch.from_numpy(values))
        torch.testing.assert_close(ours[1], torch.from_numpy(scales))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 300.0])
def test_chosen_keys_are_rounded_as_the_reference_says(scale: float) -> None:
    """On the host, to the bit."""
    shape = {"num_blocks": 5, "block_size": KEY_GROUP, "num_heads": 3, "key_dim": 48, "value_dim": 16}
    cache = allocate_host_layer(**shape, shared_value_dim=0, type_name="kivi4")
    drawn = np.random.default_rng(4).standard_normal((2, 3, KEY_GROUP, 48), np.float32) * np.float32(scale)
    drawn[..., ::7] += 5
    cache.put_keys(drawn, np.array([4, 1]))
    packed, middle, half = key_groups.quantize(torch.from_numpy(drawn))
    assert cache.channels is not None
    channels = torch.from_numpy(cache.channels[[4, 1]]).view(torch.bfloat16)
    assert torch.equal(channels, torch.stack((middle, half), 2))
    assert torch.equal(torch.from_numpy(cache.keys[[4, 1]]), packed)


@pytest.mark.parametrize("product_level", PRODUCT_LEVELS, indirect=True, scope="function")
@pytest.mark.parametrize("heads", HEADS)
def test_bits_do_not_depend_on_steps(product_level: NativeLibrary, heads: tuple[int, int, int]) -> None:
    """Token by token among others, in chunks that begin and end anywhere, and as a whole."""
    lengths = [300, 130, 70]
    whole = Texts.draw(product_level, lengths, heads)
    expected = whole.run((which, 0, length) for which, length in enumerate(lengths))
    for size in (1, 37, 64, 129):
        texts = Texts.draw(product_level, lengths, heads)
        for start in range(0, max(lengths), size):
            spans = [
                (which, start, min(start + size, length))
                for which, length in enumerate(lengths)
                if start < length
            ]
            for (which, begin, end), rows in zip(spans, texts.run(spans), strict=True):
                assert torch.equal(rows, expected[which][begin:end]), (size, which, begin)


def test_rejected_drafts_leave_nothing(native: NativeLibrary) -> None:
    """They may fill a block and reach into the next one; what replaces them has its usual bits."""
    texts = Texts.draw(native, [150], HEADS[0])
    expected = texts.run([(0, 0, 150)])[0]
    texts = Texts.draw(native, [150], HEADS[0])
    texts.run([(0, 0, 60)])
    right = texts.rows[0].copy()
    for start, accepted in ((60, 1), (61, 3), (64, 1), (65, 0)):
        texts.rows[0] = right.copy()
        texts.rows[0][start + 1 + accepted : start + 8] += 100
        rows = texts.run([(0, start, start + 8)])[0]
        assert torch.equal(rows[: 1 + accepted], expected[start : start + 1 + accepted]), start
    texts.rows[0] = right
    assert torch.equal(texts.run([(0, 66, 150)])[0], expected[66:])


def test_a_number_that_is_none_shows(native: NativeLibrary) -> None:
    """In a key, by the rows that look at it, whole or rounded; not by others."""
    texts = Texts.draw(native, [140], HEADS[0])
    texts.rows[0][70, 4 * 64 + 3] = np.nan
    rows = texts.run([(0, 0, 140)])[0]
    # Query heads 0 and 1 look at the first kv head.
    assert rows[:70].isfinite().all()
    assert rows[:, 2:].isfinite().all()
    assert not rows[70:, :2].isfinite().any(-1).any()
