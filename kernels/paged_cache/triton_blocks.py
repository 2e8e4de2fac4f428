"""Blocks of all layers to rows of one buffer and back, one launch for all tensors of a cache.

A row holds one block: the tensors' pieces one after another, each at its own offset. Everything is moved as
words of four bytes, whatever its type.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def move_blocks_kernel(
    bases,
    offsets,
    sizes,
    blocks,
    rows,
    row_words,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, t, c): words [c * BLOCK, (c + 1) * BLOCK) of block blocks[r] of tensor t. OUT copies from
    the cache to row r, else from row r into the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    size = tl.load(sizes + tensor)
    first = tl.program_id(2) * BLOCK
    if first >= size:
        return
    place = first + tl.arange(0, BLOCK)
    inside = place < size
    base = tl.load(bases + tensor).to(tl.pointer_type(tl.int32))
    inner = base + tl.load(blocks + row) * size + place
    outer = rows + row * row_words + tl.load(offsets + tensor) + place
    if OUT:
        tl.store(outer, tl.load(inner, mask=inside), mask=inside)
    else:
        tl.store(inner, tl.load(outer, mask=inside), mask=inside)


def move_blocks(
    bases: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    blocks: Tensor,
    rows: Tensor,
    *,
    largest: int,
    out: bool,
) -> None:
    """Tensors t at addresses bases [X], whose blocks are sizes [X] words, in rows [B, words] int32 at offsets
    [X]; blocks [B] names the block of each row. All indices are int64; `largest` is the largest size.
    """
    if blocks.shape[0]:
        grid = (blocks.shape[0], bases.shape[0], triton.cdiv(largest, BLOCK))
        move_blocks_kernel[grid](
            bases, offsets, sizes, blocks, rows, rows.stride(0), OUT=out, BLOCK=BLOCK, num_warps=8
        )
