"""From logits to tokens on the device: penalties, biases and grammar masks, then filters and the draw.

Filters need no sort: the smallest logit that stays is found by bisection over the 32 bits of a float's order,
so a row costs as many passes over itself as the filters that it uses have bits, all of them in the cache.
Equal logits stay or go together, and the noise is that of engine/kernels/sampling/noise.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(-(1 << 31))
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What each row asks for. All on the device; an option that no row uses is None."""

    temperature: Tensor  # [R] float32; 0 takes the most likely token
    min_p: Tensor  # [R] float32; 0 is off
    top_k: Tensor  # [R] int32; 0 is off
    top_p: Tensor  # [R] float32; 1 is off
    noise_keys: Tensor  # [R] int64, of noise.row_keys
    repetition: Tensor | None = None  # [R] float32
    frequency: Tensor | None = None  # [R] float32
    presence: Tensor | None = None  # [R] float32
    count_row: Tensor | None = None  # [R] int32, row in the tables of counts; -1 is none
    output_counts: Tensor | None = None  # [W, V] int32
    seen: Tensor | None = None  # [W, V] bool
    bias_row: Tensor | None = None  # [R] int32, row of `biases`; -1 is none
    biases: Tensor | None = None  # [W, V] float32
    mask_row: Tensor | None = None  # [R] int32, row of `masks`; -1 is none
    masks: Tensor | None = None  # [W, V/32] int32, bit i % 32 of word i / 32 allows token i


@triton.jit
def process_logits_kernel(
    logits,
    out,
    repetition,
    frequency,
    presence,
    count_row,
    output_counts,
    seen,
    bias_row,
    biases,
    mask_row,
    masks,
    finite,
    vocab_size,
    mask_words,
    WRITE: tl.constexpr,
    PENALTIES: tl.constexpr,
    BIASES: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
):
    """One program per row and BLOCK tokens. A row without an option passes unchanged. `finite` [R, programs]
    says whether the logits were; without WRITE that is all.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    sound = tl.min((tl.abs(value) < float("inf")).to(tl.int32), axis=0)
    tl.store(finite + row * tl.num_programs(1) + tl.program_id(1), sound)
    if PENALTIES:
        wide = tl.load(count_row + row).to(tl.int64)
        if wide >= 0:
            count = tl.load(output_counts + wide * vocab_size + token, mask=inside, other=0)
            occurred = tl.load(seen + wide * vocab_size + token, mask=inside, other=0) != 0
            factor = tl.load(repetition + row)
            value = tl.where(occurred, tl.where(value > 0, value / factor, value * factor), value)
            value -= count.to(tl.float32) * tl.load(frequency + row)
            value -= tl.where(count > 0, tl.load(presence + row), 0.0)
    if BIASES:
        wide = tl.load(bias_row + row).to(tl.int64)
        if wide >= 0:
            value += tl.load(biases + wide * vocab_size + token, mask=inside, other=0.0)
    if MASKS:
        wide = tl.load(mask_row + row).to(tl.int64)
        if wide >= 0:
            word = tl.load(masks + wide * mask_words + token // 32, mask=inside, other=0)
            value = tl.where(((word >> (token % 32)) & 1) != 0, value, float("-inf"))
    if WRITE:
        tl.store(out + row * vocab_size + token, value, mask=inside)


@triton.jit
def _order(value):
    """Whole numbers in the order of floats: -0.0 and 0.0 are neighbours, infinities are at the ends."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _gumbel(key, token):
    """Standard Gumbel noise in float64, a pure function of a row's key and the token (splitmix64)."""
    bits = key.to(tl.uint64) + (token + 1).to(tl.uint64) * tl.full([], GOLDEN, tl.uint64)
    bits = (bits ^ (bits >> 30)) * tl.full([], FIRST, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], SECOND, tl.uint64)
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _beyond(logits, vocab_size, temperature, largest, floor, bound, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Of the tokens at or above `floor`: how many lie above `bound`, or (MASS) their unnormalized
    probability.
    """
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        value = tl.load(logits + token, mask=inside, other=float("-inf")) / temperature
        order = _order(value)
        counted = inside & (order > bound) & (order >= floor)
        if MASS:
            total += tl.sum(tl.where(counted, tl.exp(value - largest), 0.0), axis=0)
        else:
            total += tl.sum(tl.where(counted, 1.0, 0.0), axis=0)
    return total


@triton.jit
def _smallest_that_stays(
    logits, vocab_size, temperature, largest, floor, limit, BLOCK: tl.constexpr, MASS: tl.constexpr
):
    """The smallest order with less than `limit` above it, by bisection; at least `floor`."""
    low = floor.to(tl.int64)
    high = _order(largest).to(tl.int64)
    # 33 halvings of a range of 32 bits leave one number.
    for _ in range(33):
        middle = low + (high - low) // 2
        above = _beyond(logits, vocab_size, temperature, largest, floor, middle, BLOCK, MASS)
        enough = above < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high.to(tl.int32)


@triton.jit
def draw_kernel(
    processed,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    noise_keys,
    tokens,
    allowed,
    vocab_size,
    BLOCK: tl.constexpr = BLOCK,
):
    """One program per row: threshold of min-p, top-k and top-p, then the largest logit plus noise."""
    row = tl.program_id(0).to(tl.int64)
    logits = processed + row * vocab_size
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    largest = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")) / temperature
        largest = tl.maximum(largest, tl.max(value, axis=0))
    # Minus infinity never stays, unless nothing else is there.
    floor = _order(tl.full([], float("-inf"), tl.float32)) + 1
    min_p = tl.load(min_ps + row)
    if min_p > 0:
        floor = tl.maximum(floor, _order(largest + tl.log(min_p)))
    floor = tl.minimum(floor, _order(largest))
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (top_k < vocab_size) & (greedy == 0):
        floor = _smallest_that_stays(
            logits, vocab_size, temperature, largest, floor, top_k.to(tl.float32), BLOCK, False
        )
    top_p = tl.load(top_ps + row)
    if (top_p < 1) & (greedy == 0):
        whole = _beyond(logits, vocab_size, temperature, largest, floor, LOWEST, BLOCK, True)
        floor = _smallest_that_stays(
            logits, vocab_size, temperature, largest, floor, top_p * whole, BLOCK, True
        )
    key = tl.load(noise_keys + row)
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        value = tl.load(logits + token, mask=inside, other=float("-inf")) / temperature
        stays = inside & (_order(value) >= floor)
        score = value.to(tl.float64)
        if greedy == 0:
            score += _gumbel(key, token.to(tl.int64))
        score = tl.where(stays, score, float("-inf"))
        here = tl.max(score, axis=0)
        place = tl.argmax(score, axis=0)
        if here > best:
            best = here
            winner = (start + place).to(tl.int64)
    tl.store(tokens + row, winner)
    tl.store(allowed + row, (largest > float("-inf")) & (largest < float("inf")))


def process(logits: Tensor, options: RowOptions, *, copy: bool = False) -> tuple[Tensor, Tensor]:
    """logits [R, V] float32 -> logits after penalties, biases and masks [R, V], and whether the given ones
    were finite [R]. Where no row asks for anything these are the given ones, unless `copy` is wanted.
    """
    rows, vocab_size = logits.shape
    asked = any(each is not None for each in (options.count_row, options.bias_row, options.mask_row))
    write = copy or asked
    processed = torch.empty_like(logits) if write else logits
    blocks = triton.cdiv(vocab_size, BLOCK)
    finite = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    unused = options.temperature

    def or_unused(tensor: Tensor | None) -> Tensor:
        return unused if tensor is None else tensor

    if rows:
        process_logits_kernel[(rows, blocks)](
            logits,
            processed,
            or_unused(options.repetition),
            or_unused(options.frequency),
            or_unused(options.presence),
            or_unused(options.count_row),
            or_unused(options.output_counts),
            or_unused(options.seen),
            or_unused(options.bias_row),
            or_unused(options.biases),
            or_unused(options.mask_row),
            or_unused(options.masks),
            finite,
            vocab_size,
            0 if options.masks is None else options.masks.shape[1],
            WRITE=write,
            PENALTIES=options.count_row is not None,
            BIASES=options.bias_row is not None,
            MASKS=options.mask_row is not None,
        )
    return processed, finite.amin(1) > 0


def draw(processed: Tensor, options: RowOptions) -> tuple[Tensor, Tensor]:
    """Processed logits [R, V] -> tokens [R] int64, and whether anything finite was allowed [R]."""
    rows, vocab_size = processed.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=processed.device)
    allowed = torch.empty(rows, dtype=torch.bool, device=processed.device)
    if rows:
        draw_kernel[(rows,)](
            processed,
            options.temperature,
            options.min_p,
            options.top_k,
            options.top_p,
            options.noise_keys,
            tokens,
            allowed,
            vocab_size,
            num_warps=8,
        )
    return tokens, allowed


def compile_draw(vocab_size: int, device: torch.device) -> None:
    """Draws once with every combination of options, so that none is compiled while requests wait."""
    logits = torch.zeros(1, vocab_size, device=device)
    numbers = torch.zeros(4, dtype=torch.float32, device=device)
    none = torch.full((4,), -1, dtype=torch.int32, device=device)
    keys = torch.zeros(4, dtype=torch.int64, device=device)
    wide = {
        dtype: torch.zeros(1, vocab_size, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.bool, torch.float32)
    }
    masks = torch.zeros(1, triton.cdiv(vocab_size, 32), dtype=torch.int32, device=device)
    for penalties, biases, masked in itertools.product((False, True), repeat=3):
        options = RowOptions(
            temperature=numbers,
            min_p=numbers,
            top_k=none,
            top_p=numbers,
            noise_keys=keys,
            repetition=numbers,
            frequency=numbers,
            presence=numbers,
            count_row=none if penalties else None,
            output_counts=wide[torch.int32] if penalties else None,
            seen=wide[torch.bool] if penalties else None,
            bias_row=none if biases else None,
            biases=wide[torch.float32] if biases else None,
            mask_row=none if masked else None,
            masks=masks if masked else None,
        )
        processed, _ = process(logits, options)
        draw(processed, options)
