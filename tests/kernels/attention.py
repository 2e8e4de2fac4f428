"""Attention's cases, for the tests of every back end: steps over histories in shuffled blocks of a
poisoned cache, what the reference makes of them, and the bits of a row alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.attention.reference import ReferenceAttention
from kernels.paged_cache.channel_cache import ChannelCache, StepKeys
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from kernels.paged_cache.store import LayerCache, PlainCache, QuantizedCache, allocate_layer

CPU = torch.device("cpu")
# History of each sequence, and new tokens of each.
SHAPES = [
    ([1], [1]),
    ([63], [63]),
    ([1000], [1]),
    ([257, 256, 255, 16, 17], [1, 1, 1, 1, 1]),
    ([300, 5, 129, 700], [200, 5, 1, 65]),
    ([40, 41, 600], [3, 9, 64]),
]
# Query heads, kv heads, size of a head.
HEADS = [(4, 4, 16), (4, 2, 64), (6, 2, 20), (5, 1, 8), (32, 1, 8)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"with_sinks": True},
}
# A sequence, and the positions from and to which a step computes it.
Span = tuple[int, int, int]
# Prompts of these lengths, and steps that compute parts of them: decoding, chunks, both.
PROMPTS = [600, 333, 90, 511, 7]
MIXES: list[list[Span]] = [
    [(0, 599, 600)],
    [(0, 0, 100), (1, 100, 333), (2, 89, 90)],
    [(which, length - 1, length) for which, length in enumerate(PROMPTS)],
    [(0, 250, 262), (3, 256, 257), (4, 0, 7), (1, 0, 333)],
    [(3, 13, 511), (0, 300, 305)],
]


def poisoned_cache(
    dtype: Any,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_blocks: int = 5,
    block_size: int = 4,
    device: torch.device = CPU,
) -> PlainCache | QuantizedCache | ChannelCache:
    """Of blocks that hold NaN, or, of levels, 127. A value of size 0 is the first half of its key."""
    cache = allocate_layer(
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        shared_value_dim=key_dim // 2,
        dtype=dtype,
        device=device,
    )
    for tensor in cache.tensors():
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 127)
    return cache


def assert_near_codes(found: Tensor, expected: Tensor) -> None:
    """Bytes of two codes each, of which few are neighbours: sums before the rounding differ in their last
    bit.
    """
    for shift in (0, 4):
        steps = ((found >> shift & 15).int() - (expected >> shift & 15).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 0.01


def batch_of(lengths: ArrayLike, new: ArrayLike, tables: np.ndarray, block_size: int = 16) -> RaggedBatch:
    """A step that computes the last `new` tokens of sequences of these lengths."""
    return RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(new))),
        context_lens=np.asarray(lengths),
        block_tables=tables,
        block_size=block_size,
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """New tokens of some sequences, whose histories a cache holds."""

    heads: tuple[int, int]
    lengths: list[int]
    new: list[int]
    tables: np.ndarray
    block_size: int
    cache: LayerCache
    q: Tensor
    sinks: Tensor | None
    options: AttentionOptions
    # Keys and values [L, K, D] of each history.
    texts: list[tuple[Tensor, Tensor | None]]

    @property
    def batch(self) -> RaggedBatch:
        return batch_of(self.lengths, self.new, self.tables, self.block_size)

    def begun(self) -> RaggedBatch:
        """The step as attention plans it: where keys are by channel, its own are written as a layer does."""
        if not isinstance(self.cache, ChannelCache):
            return self.batch
        cache, recent_rows = self.cache, keep_newest(self.cache, self.texts, self.lengths, self.new)
        assert cache.recent is not None, "kept above"
        rows, device = self.q.shape[0], self.q.device
        cut, keys = StepKeys.of(self.batch, recent_rows, len(cache.recent), rows, device)
        cache.begin(keys)
        spans = list(zip(self.texts, self.lengths, self.new, strict=True))
        parts = [
            torch.cat([text[index][end - count : end] for text, end, count in spans])  # type: ignore[index]
            for index in range(2)
        ]
        padding = (0, 0, 0, 0, 0, rows - len(parts[0]))
        places = np.full(rows, (len(cache.keys) - 1) * self.block_size)
        slots = [
            self.tables[row, at // self.block_size] * self.block_size + at % self.block_size
            for row, (_, end, count) in enumerate(spans)
            for at in range(end - count, end)
        ]
        places[: len(slots)] = slots
        keys_now, values = (torch.nn.functional.pad(part, padding).to(device) for part in parts)
        cache.write(keys_now, values, torch.from_numpy(places).to(device))
        return cut

    def run(self, make: Callable[..., Any]) -> Tensor:
        """What a back end gives for it, whose class or the like is called with numbers of heads."""
        backend = make(num_heads=self.heads[0], num_kv_heads=self.heads[1])
        plan = backend.plan(self.begun(), self.q.device)
        return backend.run(plan, self.q, self.cache, self.options, self.sinks)

    def rows(self, span: Span) -> slice:
        """Where a span of positions lies on the axis of tokens."""
        which, start, end = span
        first = sum(self.new[: which + 1]) - self.lengths[which]
        return slice(first + start, first + end)

    def of(self, spans: Iterable[Span], padding: int = 1) -> Step:
        """A step of these spans alone, padded to a multiple of so many rows."""
        spans = list(spans)
        q = torch.cat([self.q[self.rows(span)] for span in spans])
        return replace(
            self,
            lengths=[end for *_, end in spans],
            new=[end - start for _, start, end in spans],
            tables=self.tables[[which for which, *_ in spans]],
            texts=[self.texts[which] for which, *_ in spans],
            q=torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -len(q) % padding)),
        )

    def each(self) -> list[Span]:
        """Its sequences, each a span."""
        ends = enumerate(zip(self.lengths, self.new, strict=True))
        return [(which, length - count, length) for which, (length, count) in ends]

    def in_every_way(self) -> Iterator[Step]:
        """The same for each of OPTIONS."""
        for named in OPTIONS.values():
            asked = dict(named)
            sinks = self.sinks if asked.pop("with_sinks", False) else None
            yield replace(self, options=replace(self.options, **asked), sinks=sinks)

    def to(self, device: torch.device) -> Step:
        """The same on another device."""
        cache = copy.copy(self.cache)
        for name in ("keys", "values", "scales", "channels", "recent"):
            if getattr(cache, name, None) is not None:
                setattr(cache, name, getattr(cache, name).to(device))
        sinks = None if self.sinks is None else self.sinks.to(device)
        return replace(self, cache=cache, q=self.q.to(device), sinks=sinks)


def keep_newest(
    cache: ChannelCache, texts: list[tuple[Tensor, Tensor | None]], lengths: list[int], new: list[int]
) -> np.ndarray:
    """Whole keys of the blocks in which sequences go on, as the steps before have left them, and NaN; where
    those of each begin, odd blocks first of every second one.
    """
    recent_rows = np.array([2 * row + row % 2 for row in range(len(lengths))])
    assert cache.recent is not None, "there is room"
    cache.recent.fill_(float("nan"))
    for (keys, _), start, row in zip(texts, np.subtract(lengths, new).tolist(), recent_rows, strict=True):
        index = start // KEY_GROUP
        before = keys[index * KEY_GROUP : start].transpose(0, 1)
        cache.recent[row ^ index & 1, :, : before.shape[1]] = before.to(cache.recent)
    return recent_rows


def draw(
    lengths: list[int],
    new: list[int] | None = None,
    heads: tuple[int, int, int] = (4, 2, 16),
    *,
    value_dim: int | None = None,
    dtype: Any = torch.float32,
    q_dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    padding: int = 0,
    with_sinks: bool = False,
    **options: Any,
) -> Step:
    """Random histories in shuffled blocks of a poisoned cache, rows of padding that hold NaN. Without `new`,
    whole prompts. Vectors of kivi4 are multiples of 16 elements, in blocks of 64.
    """
    num_heads, num_kv_heads, dim = heads
    new = lengths if new is None else new
    value_dim = dim if value_dim is None else value_dim
    by_channel = dtype == BY_CHANNEL
    if by_channel:
        dim, value_dim, block_size = *(-(-size // 16) * 16 for size in (dim, value_dim)), KEY_GROUP
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    cache = poisoned_cache(dtype, num_kv_heads, dim, value_dim, num_blocks=num_blocks, block_size=block_size)
    if isinstance(cache, ChannelCache):
        cache.keep_newest_keys(len(lengths) + 1)
    shuffled, texts = torch.randperm(num_blocks, generator=generator).numpy(), []
    tables = np.zeros((len(lengths), max(counts)), np.int64)
    for row, (length, count, end) in enumerate(zip(lengths, counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = shuffled[end - count : end]
        places = torch.from_numpy(np.repeat(tables[row, :count], block_size)[:length]) * block_size
        keys = torch.randn(length, num_kv_heads, dim, generator=generator)
        values = torch.randn(length, num_kv_heads, value_dim, generator=generator) if value_dim else None
        # Some channels of keys lie far from zero.
        keys[..., ::5] += 4 * by_channel
        texts.append((keys, values))
        slots = places + torch.arange(length) % block_size
        if isinstance(cache, ChannelCache):
            recent = keep_newest(cache, texts[-1:], [length], [length])
            batch = batch_of([length], [length], tables[[row]], block_size)
            cache.begin(StepKeys.of(batch, recent, 2 * len(lengths) + 4, length, CPU)[1])
        cache.write(keys, values, slots)
    q = torch.randn(sum(new), num_heads, dim, generator=generator).to(q_dtype)
    return Step(
        heads=(num_heads, num_kv_heads),
        lengths=lengths,
        new=new,
        tables=tables,
        block_size=block_size,
        cache=cache,
        q=torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding), value=float("nan")),
        sinks=torch.randn(num_heads, generator=generator) if with_sinks else None,
        options=AttentionOptions(**{"scale": dim**-0.5} | options),
        texts=texts,
    )


def compare(
    make: Callable[..., Any],
    step: Step,
    tolerance: float,
    rtol: float = 1e-5,
    device: torch.device = CPU,
    expected: Tensor | None = None,
) -> Tensor:
    """What a back end gives, which is what the reference gives, or gave, on the CPU."""
    expected = step.run(ReferenceAttention) if expected is None else expected
    found = step.to(device).run(make)
    assert found.dtype == step.q.dtype
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=tolerance, rtol=rtol)
    return found


def assert_bits_alone(
    make: Callable[..., Any], step: Step, found: Tensor, spans: Iterable[Span] | None = None
) -> None:
    """Sequences, or spans of some, have the bits alone that they have among the others."""
    for span in step.each() if spans is None else spans:
        assert torch.equal(step.of([span]).run(make), found[step.rows(span)]), span


def assert_bits_in_any_mix(make: Callable[..., Any], step: Step, padding: int = 1) -> None:
    """Any span of PROMPTS, alone or among others, gives the rows of its whole prompt at once."""
    whole = step.of(step.each(), padding).run(make)
    for mix in [*([span] for span in step.each()), *MIXES]:
        part = step.of(mix, padding)
        found = part.run(make)[: sum(part.new)].split(part.new)
        for span, rows in zip(mix, found, strict=True):
            assert torch.equal(rows, whole[step.rows(span)]), (mix, span)
