"""From logits to tokens on the device: penalties, biases and grammar masks, then filters and the draw.

Several programs share a row. None waits for the host or for another program of its launch, and nothing
depends on the other rows. The noise is that of kernels/sampling/noise, and the tokens those of
`reference.sample_by_torch`.

Shape letters: R rows, V vocabulary, B blocks of a row, G groups of a row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.triton_filters import BLOCK, GROUPS, Processed, borders, floor_of, largest_of

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
    repetition_penalty: Tensor | None = None  # [R] float32
    frequency_penalty: Tensor | None = None  # [R] float32
    presence_penalty: Tensor | None = None  # [R] float32
    count_row: Tensor | None = None  # [R] int32, row in the tables of counts; -1 is none
    output_counts: Tensor | None = None  # [W, V] int32
    seen: Tensor | None = None  # [W, V] bool
    bias_row: Tensor | None = None  # [R] int32, row of `biases`; -1 is none
    biases: Tensor | None = None  # [W, V] float32
    mask_row: Tensor | None = None  # [R] int32, row of `masks`; -1 is none
    masks: Tensor | None = None  # [W, V/32] int32, bit i % 32 of word i / 32 allows token i
    # Whether any row may ask for top-k or top-p: where none does, nothing is launched for them.
    filters: bool = True


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
    peaks,
    bottoms,
    groups,
    vocab_size,
    mask_words,
    WRITE: tl.constexpr,
    PENALTIES: tl.constexpr,
    BIASES: tl.constexpr,
    MASKS: tl.constexpr,
):
    """One program per row and BLOCK tokens. A row without an option passes unchanged, and without WRITE all
    there is to do is to say what the block is like (see Processed).
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    sound = tl.min((tl.abs(value) < float("inf")).to(tl.int32), axis=0)
    block = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(finite + block, sound)
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
    grouped = tl.reshape(tl.where(inside, value, float("-inf")), (GROUPS, BLOCK // GROUPS))
    peak = tl.max(grouped, axis=1)
    tl.store(groups + block * GROUPS + tl.arange(0, GROUPS), peak)
    tl.store(peaks + block, tl.max(peak, axis=0))
    left = inside & (value > float("-inf"))
    tl.store(bottoms + block, tl.min(tl.where(left, value, float("inf")), axis=0))


@triton.jit
def _noise_bits(key, token):
    """53 random bits, a pure function of a row's key and the token (splitmix64)."""
    bits = key.to(tl.uint64) + (token + 1).to(tl.uint64) * tl.full([], GOLDEN, tl.uint64)
    bits = (bits ^ (bits >> 30)) * tl.full([], FIRST, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], SECOND, tl.uint64)
    return (bits ^ (bits >> 31)) >> 11


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise in float64."""
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _most_noise(bits):
    """No less than _gumbel, and little more where that is large: of uniform u, -log(1 - u) in float32."""
    # The upper 32 bits of 1 - u; where they are all 0 its lower bound is that of the noise.
    rest = ((bits >> 21) ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32)
    return 22.181 - tl.log(tl.maximum(rest, 2.384185791015625e-07))


@triton.jit
def draw_kernel(
    logits,
    peaks,
    temperatures,
    min_ps,
    borders,
    noise_keys,
    scores,
    winners,
    vocab_size,
    num_blocks,
    FILTERS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program per row and BLOCK tokens: the best of them, by logit plus noise over what stays, or by
    logit alone where the temperature is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    largest = largest_of(peaks, temperature, row, num_blocks, BLOCKS)
    floor = largest
    if greedy == 0:
        floor = floor_of(min_ps, row, largest)
        if FILTERS:
            floor = tl.maximum(floor, tl.load(borders + row))
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int64) + vocab_size
    # Nothing of most blocks stays.
    peak = tl.div_rn(tl.load(peaks + row * num_blocks + block), temperature)
    if (peak >= floor) & (tl.abs(largest) < float("inf")):
        offset = tl.arange(0, BLOCK)
        token = (block * BLOCK + offset).to(tl.int64)
        value = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        value = tl.div_rn(value, temperature)
        stays = (value >= floor) & (tl.abs(value) < float("inf"))
        if greedy:
            best = tl.max(tl.where(stays, value, float("-inf")), axis=0).to(tl.float64)
            winner = tl.min(tl.where(stays, token, vocab_size), axis=0)
        else:
            # Exact noise is two logarithms in float64: it is computed for those alone that a bound lets win.
            key = tl.load(noise_keys + row)
            bound = value - largest + _most_noise(_noise_bits(key, token))
            bound = tl.where(stays, bound, float("-inf"))
            most = tl.max(bound, axis=0)
            while (most > float("-inf")) & (most.to(tl.float64) + largest.to(tl.float64) >= best):
                first = tl.argmax(bound, axis=0)
                candidate = (block * BLOCK + first).to(tl.int64)
                here = tl.sum(tl.where(offset == first, value, 0.0), axis=0)
                score = here.to(tl.float64) + _gumbel(_noise_bits(key, candidate))
                better = (score > best) | ((score == best) & (candidate < winner))
                best = tl.where(better, score, best)
                winner = tl.where(better, candidate, winner)
                bound = tl.where(offset == first, float("-inf"), bound)
                most = tl.max(bound, axis=0)
    tl.store(scores + row * num_blocks + block, best)
    tl.store(winners + row * num_blocks + block, winner)


@triton.jit
def choose_kernel(finite, peaks, scores, winners, outcome, num_blocks, BLOCKS: tl.constexpr):
    """One program per row: the best of its blocks, the first of equal ones; whether the model's logits were
    finite, and whether any token was allowed.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(inside & (score == best), tl.load(winners + at, mask=inside), 1 << 62), axis=0)
    sound = tl.min(tl.load(finite + at, mask=inside, other=1), axis=0)
    largest = tl.max(tl.load(peaks + at, mask=inside, other=float("-inf")), axis=0)
    allowed = tl.abs(largest) < float("inf")
    num_rows = tl.num_programs(0)
    # A token that may not be used is 0, since what comes next may look it up.
    drawn = (sound != 0) & allowed & (best > float("-inf"))
    tl.store(outcome + row, tl.where(drawn, winner, 0))
    tl.store(outcome + num_rows + row, sound.to(tl.int64))
    tl.store(outcome + 2 * num_rows + row, allowed.to(tl.int64))


def process(logits: Tensor, options: RowOptions, *, copy: bool = False) -> Processed:
    """logits [R, V] float32 -> those to draw from. Where no row asks for penalties, biases or masks they are
    the given ones, unless a `copy` is wanted.
    """
    rows, vocab_size = logits.shape
    asked = any(each is not None for each in (options.count_row, options.bias_row, options.mask_row))
    write = copy or asked
    blocks = triton.cdiv(vocab_size, BLOCK.value)
    found = Processed(
        logits=torch.empty_like(logits) if write else logits,
        finite=torch.empty(rows, blocks, dtype=torch.int32, device=logits.device),
        peaks=logits.new_empty(rows, blocks),
        bottoms=logits.new_empty(rows, blocks),
        groups=logits.new_empty(rows, blocks * GROUPS.value),
    )
    wanted = (
        *(options.repetition_penalty, options.frequency_penalty, options.presence_penalty),
        *(options.count_row, options.output_counts, options.seen),
        *(options.bias_row, options.biases, options.mask_row, options.masks),
    )
    if rows:
        process_logits_kernel[(rows, blocks)](
            logits,
            found.logits,
            # Stands for options that no row uses, which the kernel does not read.
            *(options.temperature if each is None else each for each in wanted),
            found.finite,
            found.peaks,
            found.bottoms,
            found.groups,
            vocab_size,
            0 if options.masks is None else options.masks.shape[1],
            WRITE=write,
            PENALTIES=options.count_row is not None,
            BIASES=options.bias_row is not None,
            MASKS=options.mask_row is not None,
        )
    return found


def changed(processed: Processed, options: RowOptions) -> Processed:
    """The same after its logits were written to."""
    plain = replace(options, count_row=None, bias_row=None, mask_row=None)
    return replace(process(processed.logits, plain), finite=processed.finite)


def draw(processed: Processed, options: RowOptions) -> Tensor:
    """Tokens, whether the model's logits were finite, and whether any token was allowed [3, R] int64. A row
    that may not be used has token 0.
    """
    logits, peaks = processed.logits, processed.peaks
    rows, vocab_size = logits.shape
    num_blocks = peaks.shape[1]
    outcome = torch.empty(3, rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return outcome
    scores = torch.empty(rows, num_blocks, dtype=torch.float64, device=logits.device)
    winners = torch.empty(rows, num_blocks, dtype=torch.int64, device=logits.device)
    blocks = triton.next_power_of_2(num_blocks)
    filters = (options.temperature, options.min_p, options.top_k, options.top_p)
    draw_kernel[(rows, num_blocks)](
        logits,
        peaks,
        options.temperature,
        options.min_p,
        borders(processed, *filters) if options.filters else options.temperature,
        options.noise_keys,
        scores,
        winners,
        vocab_size,
        num_blocks,
        FILTERS=options.filters,
        BLOCKS=blocks,
        num_warps=8,
    )
    choose_kernel[(rows,)](
        processed.finite, peaks, scores, winners, outcome, num_blocks, BLOCKS=blocks, num_warps=1
    )
    return outcome


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
            repetition_penalty=numbers,
            frequency_penalty=numbers,
            presence_penalty=numbers,
            count_row=none if penalties else None,
            output_counts=wide[torch.int32] if penalties else None,
            seen=wide[torch.bool] if penalties else None,
            bias_row=none if biases else None,
            biases=wide[torch.float32] if biases else None,
            mask_row=none if masked else None,
            masks=masks if masked else None,
        )
        processed = process(logits, options)
    for filters in (False, True):
        draw(processed, replace(options, filters=filters))
