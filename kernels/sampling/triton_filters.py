"""Top-k and top-p on the device: the smallest logit that stays in each row, found without a sort and without
waiting for the host.

Several programs share a row. First comes a floor that is surely not above the border: of top-k the k-th
largest of the peaks of small groups, of top-p the distance from the largest logit beyond which not even the
whole vocabulary would have enough of the probability. Logits from there on are counted (or their probability
added up) in bins by their distance from the largest, which leaves one bin for the border. Its logits are
gathered, usually a few dozen, and one program finds the border among them by bisection over the order of
floats. Where more lie there than the list has room for (rows of nearly equal logits), that program reads the
row itself: slower, and the same border.

Probabilities are added as whole numbers, so that no sum depends on an order, on a batch or on a run. Logits
that lie further below the largest than noise can lift them are left out: they are never drawn.

Shape letters: R rows, V vocabulary, B blocks of a row, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(4096)
# Groups in a block.
GROUPS = tl.constexpr(32)
BINS = tl.constexpr(2048)
# Logits on the border's list of a row, and how many of them are looked at at once.
CAPACITY = tl.constexpr(8192)
PART = tl.constexpr(1024)
# Noise lies within -3.7 and 37.5 (noise.gumbel), so what lies this far below the largest logit loses.
DEEPEST = tl.constexpr(42.0)
# The probability of the most likely token; sums over 2^20 tokens fit 63 bits.
ONE = tl.constexpr(1 << 42)
# Whole numbers of 64 bits that a row has after its bins: probability of the row, length of the list, unused.
SUMS = tl.constexpr(4)
# Numbers about a row's logits (over the temperature), in float32: the largest, the smallest that counts,
# the smallest that may be the border, the width of a bin.
FRAME = tl.constexpr(4)


@dataclass(frozen=True, kw_only=True)
class Processed:
    """Logits to draw from, and what is known of each block of them."""

    logits: Tensor  # [R, V] float32, after penalties, biases and masks
    finite: Tensor  # [R, B] int32, whether the model's logits were; 0 is no
    peaks: Tensor  # [R, B] float32, the largest of a block
    bottoms: Tensor  # [R, B] float32, the smallest that is not excluded
    groups: Tensor  # [R, G] float32, the largest of a group of neighbours


@triton.jit
def largest_of(peaks, temperature, row, num_blocks, BLOCKS: tl.constexpr):
    """Largest logit of a row over the temperature."""
    block = tl.arange(0, BLOCKS)
    peak = tl.load(peaks + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    return tl.div_rn(tl.max(peak, axis=0), temperature)


@triton.jit
def floor_of(least_shares, row, largest):
    """The smallest logit that has the least share of the largest's probability, and can be drawn."""
    least_share = tl.load(least_shares + row)
    floor = largest - DEEPEST
    if least_share > 0:
        floor = tl.maximum(floor, largest + tl.log(least_share))
    return floor


@triton.jit
def _asked(temperatures, top_ks, top_ps, row, vocab_size):
    """Temperature, top-k (0 is off), top-p, and whether the row has a border to find."""
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(top_ps + row)
    return temperature, top_k, top_p, (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _placed(value, largest, floor, width):
    """Whether a logit lies at or above the floor, and its bin: farther from the largest in a later one."""
    counted = (value >= floor) & (value <= largest)
    distance = largest - tl.where(counted, value, largest)
    return counted, tl.minimum((distance * (1.0 / width)).to(tl.int32), BINS - 1)


@triton.jit
def _share(value, largest):
    """Unnormalized probability, as a whole number."""
    return (tl.exp(value - largest) * ONE).to(tl.int64)


@triton.jit
def _order(value):
    """Whole numbers in the order of floats: -0.0 and 0.0 are neighbours, infinities are at the ends."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The float of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def frame_kernel(
    peaks,
    bottoms,
    groups,
    temperatures,
    least_shares,
    top_ks,
    top_ps,
    frames,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """One program per row: its frame."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, asked = _asked(temperatures, top_ks, top_ps, row, vocab_size)
    if asked:
        largest = largest_of(peaks, temperature, row, num_blocks, BLOCKS)
        # Values that are not finite are not counted.
        largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        block = tl.arange(0, BLOCKS)
        bottom = tl.load(bottoms + row * num_blocks + block, mask=block < num_blocks, other=float("inf"))
        smallest = tl.div_rn(tl.min(bottom, axis=0), temperature)
        floor = floor_of(least_shares, row, largest)
        if top_k > 0:
            group = tl.arange(0, BLOCKS * GROUPS)
            number = num_blocks * GROUPS
            peak = tl.load(groups + row * number + group, mask=group < number, other=float("-inf"))
            order = _order(peak).to(tl.int64)
            low = tl.min(order, axis=0)
            high = tl.max(order, axis=0)
            # The k largest peaks are logits, so the k-th largest logit is no smaller than the k-th peak.
            while low < high:
                middle = low + ((high - low) >> 1)
                enough = tl.sum((order > middle).to(tl.int32), axis=0) < top_k
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
            lowest = tl.div_rn(_value(low.to(tl.int32)), temperature)
        else:
            # All that lies further below has less than 1 - top_p even if all the vocabulary lay there.
            lowest = largest - tl.log(vocab_size / (1.0 - top_p)) - 0.01
        lowest = tl.maximum(tl.maximum(floor, lowest), smallest)
        frame = frames + row * FRAME
        tl.store(frame, largest)
        tl.store(frame + 1, floor)
        tl.store(frame + 2, lowest)
        tl.store(frame + 3, tl.maximum(largest - lowest, 1e-6) / BINS)


@triton.jit
def count_kernel(logits, temperatures, top_ks, top_ps, frames, sums, vocab_size):
    """One program per row and BLOCK tokens: by bin the tokens, or without top-k their probability, and then
    that of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, _, asked = _asked(temperatures, top_ks, top_ps, row, vocab_size)
    if asked:
        frame = frames + row * FRAME
        largest = tl.load(frame)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        value = tl.div_rn(value, temperature)
        counted, bins = _placed(value, largest, tl.load(frame + 2), tl.load(frame + 3))
        mine = sums + row * (BINS + SUMS)
        if top_k > 0:
            tl.atomic_add(mine + bins, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")
        else:
            share = tl.where((value >= tl.load(frame + 1)) & (value <= largest), _share(value, largest), 0)
            tl.atomic_add(mine + bins, share, mask=counted, sem="relaxed")
            tl.atomic_add(mine + BINS, tl.sum(share, axis=0), sem="relaxed")


@triton.jit
def locate_kernel(temperatures, top_ks, top_ps, sums, edges, vocab_size):
    """One program per row: first and last bin to list, and what lies in bins before the first."""
    row = tl.program_id(0).to(tl.int64)
    _, top_k, top_p, asked = _asked(temperatures, top_ks, top_ps, row, vocab_size)
    if asked:
        bins = tl.arange(0, BINS)
        mine = sums + row * (BINS + SUMS)
        content = tl.load(mine + bins)
        through = tl.cumsum(content, axis=0)
        limit = top_k.to(tl.float64)
        if top_k == 0:
            limit = top_p.to(tl.float64) * tl.load(mine + BINS).to(tl.float64)
        last = tl.minimum(tl.sum((through.to(tl.float64) < limit).to(tl.int32), axis=0), BINS - 1)
        # Top-p is of what top-k leaves, whose probability is known only with the border of top-k.
        first = tl.where((top_k > 0) & (top_p < 1), 0, last)
        tl.store(edges + 3 * row, first)
        tl.store(edges + 3 * row + 1, last)
        tl.store(edges + 3 * row + 2, tl.sum(tl.where(bins < first, content, 0), axis=0))


@triton.jit
def gather_kernel(logits, temperatures, top_ks, top_ps, frames, sums, edges, near, vocab_size):
    """One program per row and BLOCK tokens: lists the logits among which the border is, in any order."""
    row = tl.program_id(0).to(tl.int64)
    temperature, _, _, asked = _asked(temperatures, top_ks, top_ps, row, vocab_size)
    if asked:
        frame = frames + row * FRAME
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        value = tl.div_rn(value, temperature)
        counted, bins = _placed(value, tl.load(frame), tl.load(frame + 2), tl.load(frame + 3))
        listed = counted & (bins >= tl.load(edges + 3 * row)) & (bins <= tl.load(edges + 3 * row + 1))
        number = tl.sum(listed.to(tl.int64), axis=0)
        if number > 0:
            begin = tl.atomic_add(sums + row * (BINS + SUMS) + BINS + 1, number, sem="relaxed")
            offset = begin + tl.cumsum(listed.to(tl.int32), axis=0) - 1
            tl.store(near + row * CAPACITY + offset, value, mask=listed & (offset < CAPACITY))


@triton.jit
def _beyond(
    source,
    length,
    divisor,
    largest,
    floor,
    width,
    first,
    last,
    bound,
    MASS: tl.constexpr,
):
    """Of the logits in the border's bins: how many lie above `bound`, or (MASS) their probability."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, length, PART):
        offset = start + tl.arange(0, PART)
        value = tl.div_rn(tl.load(source + offset, mask=offset < length, other=float("-inf")), divisor)
        counted, bins = _placed(value, largest, floor, width)
        counted &= (bins >= first) & (bins <= last) & (_order(value) > bound)
        if MASS:
            total += tl.sum(tl.where(counted, _share(value, largest), 0), axis=0)
        else:
            total += tl.sum(counted.to(tl.int64), axis=0)
    return total


@triton.jit
def _smallest_that_stays(
    low,
    high,
    before,
    limit,
    source,
    length,
    divisor,
    largest,
    floor,
    width,
    first,
    last,
    MASS: tl.constexpr,
):
    """Of orders from `low` to `high` the smallest above which less than `limit` lies, by bisection."""
    while low < high:
        middle = low + ((high - low) >> 1)
        over = _beyond(source, length, divisor, largest, floor, width, first, last, middle, MASS)
        enough = (before + over).to(tl.float64) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _extent(source, length, divisor, largest, floor, width, first, last):
    """Smallest and largest order of the border's bins, and the largest of the last bin."""
    low = tl.full([], (1 << 31) - 1, tl.int64)
    most = tl.full([], -(1 << 31), tl.int64)
    high = most
    for start in range(0, length, PART):
        offset = start + tl.arange(0, PART)
        value = tl.div_rn(tl.load(source + offset, mask=offset < length, other=float("-inf")), divisor)
        counted, bins = _placed(value, largest, floor, width)
        listed = counted & (bins >= first) & (bins <= last)
        order = _order(value).to(tl.int64)
        low = tl.minimum(low, tl.min(tl.where(listed, order, (1 << 31) - 1), axis=0))
        most = tl.maximum(most, tl.max(tl.where(listed, order, -(1 << 31)), axis=0))
        high = tl.maximum(high, tl.max(tl.where(listed & (bins == last), order, -(1 << 31)), axis=0))
    return low, most, high


@triton.jit
def _frame_of(frames, row):
    """A row's largest logit, where its bins begin, and how wide they are."""
    frame = frames + row * FRAME
    return tl.load(frame), tl.load(frame + 2), tl.load(frame + 3)


@triton.jit
def settle_kernel(logits, temperatures, top_ks, top_ps, frames, sums, edges, near, borders, vocab_size):
    """One program per row: the smallest logit (over the temperature) that top-k and top-p leave."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, asked = _asked(temperatures, top_ks, top_ps, row, vocab_size)
    border = tl.full([], float("-inf"), tl.float32)
    mine = sums + row * (BINS + SUMS) + BINS
    number = tl.load(mine + 1)
    # Nothing is listed where fewer tokens than top-k are left.
    if asked & (number > 0):
        largest, floor, width = _frame_of(frames, row)
        first = tl.load(edges + 3 * row).to(tl.int32)
        last = tl.load(edges + 3 * row + 1).to(tl.int32)
        before = tl.load(edges + 3 * row + 2)
        source = near + row * CAPACITY
        length = number.to(tl.int32)
        divisor = tl.full([], 1.0, tl.float32)
        if number > CAPACITY:
            source = logits + row * vocab_size
            length = vocab_size
            divisor = temperature
        low, most, high = _extent(source, length, divisor, largest, floor, width, first, last)
        whole = tl.load(mine)
        if top_k > 0:
            limit = top_k.to(tl.float64)
            low = _smallest_that_stays(
                low, high, before, limit, source, length, divisor, largest, floor, width, first, last, False
            )
            if top_p < 1:
                # All of the k best are listed, and of several that equal the last of them as many as belong.
                over = _beyond(source, length, divisor, largest, floor, width, first, last, low, False)
                whole = _beyond(source, length, divisor, largest, floor, width, first, last, low, True)
                equal = tl.minimum(number, top_k.to(tl.int64)) - over
                whole += equal * _share(_value(low.to(tl.int32)), largest)
        if top_p < 1:
            limit = top_p.to(tl.float64) * whole.to(tl.float64)
            low = _smallest_that_stays(
                low, most, before, limit, source, length, divisor, largest, floor, width, first, last, True
            )
        border = _value(low.to(tl.int32))
    tl.store(borders + row, border)


def borders(
    processed: Processed, temperature: Tensor, least_share: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The smallest logit over the temperature that top-k and top-p leave in each row [R] float32, of
    those with some share of the largest. Minus infinity where a row asks for neither. Options: RowOptions.
    Launches and memory are the same for all logits.
    """
    logits, peaks = processed.logits, processed.peaks
    rows, vocab_size = logits.shape
    num_blocks = peaks.shape[1]
    device = logits.device
    sums = torch.zeros(rows, BINS.value + SUMS.value, dtype=torch.int64, device=device)
    frames = torch.empty(rows, FRAME.value, dtype=torch.float32, device=device)
    # First and last bin that is listed, and the tokens, or the probability, before.
    edges = torch.empty(rows, 3, dtype=torch.int64, device=device)
    near = torch.empty(rows, CAPACITY.value, dtype=torch.float32, device=device)
    found = torch.empty(rows, dtype=torch.float32, device=device)
    asked = (temperature, top_k, top_p)
    frame_kernel[(rows,)](
        peaks,
        processed.bottoms,
        processed.groups,
        temperature,
        least_share,
        top_k,
        top_p,
        frames,
        vocab_size,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    count_kernel[(rows, num_blocks)](logits, *asked, frames, sums, vocab_size, num_warps=8)
    locate_kernel[(rows,)](*asked, sums, edges, vocab_size, num_warps=8)
    gather_kernel[(rows, num_blocks)](logits, *asked, frames, sums, edges, near, vocab_size, num_warps=8)
    settle_kernel[(rows,)](logits, *asked, frames, sums, edges, near, found, vocab_size, num_warps=8)
    return found
