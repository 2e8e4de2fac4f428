"""Launch shapes of products in Triton, by rows: how large tiles are, and into how many parts inputs are cut.

Few rows take small tiles, and a product with too few of them for a device's processors is cut along K, too.
How K is cut depends on the weight and the device alone, and parts are added from the first to the last,
whether programs of their own computed them or one did, one after the other; outputs lie along the side of the
matrix unit that is 64 wide, so that few rows and many take the same instructions. So a row's bits do not
depend on the batch.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.linear.triton_rows import GroupedRows

# Where there is no device to ask: those of an H100 or H200.
USUAL_PROCESSORS = 132
# Programs that each multiprocessor should have in flight, and what a part costs besides its steps, in steps.
PROGRAMS_PER_PROCESSOR, PART_COST, MOST_PARTS = 2, 2, 16
# More rows than this fill a device without parts of K that are programs of their own.
MOST_PARTED_ROWS = 128
NARROW_TILE, WIDE_TILE = 64, 128

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TileShape:
    """What a launch decides besides the weight's own sizes."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


# Most rows of a launch, to its shape. Four warps take 64 outputs at a time; nothing spills (compile_ahead).
SHAPES = (
    (16, TileShape(16, NARROW_TILE, 4, 4)),
    (32, TileShape(32, NARROW_TILE, 4, 4)),
    (MOST_PARTED_ROWS, TileShape(64, NARROW_TILE, 4, 3)),
)
# For more rows, by how many sums a program has: one; one and that of a group, or block; and one of inputs.
MANY_ROWS = {
    1: TileShape(128, WIDE_TILE, 8, 3),
    2: TileShape(64, WIDE_TILE, 8, 3),
    3: TileShape(32, WIDE_TILE, 8, 3),
}
# Inputs of four bytes, which have no matrix unit.
PLAIN_SHAPE = TileShape(16, NARROW_TILE, 4, 1)

_smaller: dict[tuple[str, TileShape], TileShape] = {}


def shape_for(
    rows: int, groups: GroupedRows | None = None, *, wide: bool = False, sums: int = 1
) -> TileShape:
    """The shape of a launch with so many rows, or with those of groups, whose tiles are cut already; `wide`
    that inputs have four bytes, `sums` of MANY_ROWS.
    """
    if wide:
        return PLAIN_SHAPE if groups is None else replace(PLAIN_SHAPE, rows=groups.tile)
    if groups is None:
        return next((shape for most, shape in SHAPES if rows <= most), MANY_ROWS[sums])
    # Three sums of 64 rows leave no registers for wide tiles.
    of_tile = {shape.rows: shape for _, shape in (SHAPES if sums > 2 else SHAPES[:-1])}
    return of_tile.get(groups.tile, replace(MANY_ROWS[sums], rows=groups.tile))


def grid_of(
    shape: TileShape, rows: int, width: int, groups: GroupedRows | None, parts: int, gate: str | None
) -> tuple[int, int, int]:
    """Programs of a launch whose result is [rows, width], half as wide as the weight with a gate."""
    tiles = triton.cdiv(rows, shape.rows) if groups is None else groups.weight_of_tile.shape[0]
    return tiles, triton.cdiv(width, shape.outputs // 2 if gate else shape.outputs), parts


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_parts(outputs: int, steps: int, device: torch.device) -> int:
    """Into how many parts the inputs of a weight are cut: such that the busiest processor has least to do."""
    processors = num_processors(device)
    tiles = triton.cdiv(outputs, NARROW_TILE)
    # A few tiles short of two for each processor is as good.
    enough = PROGRAMS_PER_PROCESSOR * processors * 15 // 16
    if tiles >= enough:
        return 1

    def time(parts: int) -> int:
        return int(triton.cdiv(tiles * parts, processors) * (triton.cdiv(steps, parts) + PART_COST))

    most = min(MOST_PARTS, 2 * enough // tiles, steps)
    best = min(range(min(most, triton.cdiv(enough, tiles)), most + 1), key=time)
    # Each part has steps: rounding leaves none empty.
    return int(triton.cdiv(steps, triton.cdiv(steps, best)))


@dataclass(frozen=True)
class Workspace:
    """What programs that compute parts of one tile leave for the last of them to add. All products of a
    device share it: they follow one another in one stream.
    """

    sums: Tensor  # float32
    arrived: Tensor  # int32, zeros between launches

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        """The device's own, which lasts as long as the process: captured graphs keep its address. Products
        ask for it when they are made, so that it is there before anything is captured.
        """
        return _workspace(device)


@cache
def _workspace(device: torch.device) -> Workspace:
    # num_parts makes no more of tiles of NARROW_TILE outputs, and launches with parts have no more rows.
    tiles = 2 * PROGRAMS_PER_PROCESSOR * num_processors(device)
    return Workspace(
        sums=torch.empty(tiles * NARROW_TILE * MOST_PARTED_ROWS, dtype=torch.float32, device=device),
        arrived=torch.zeros(tiles * MOST_PARTED_ROWS // SHAPES[0][1].rows, dtype=torch.int32, device=device),
    )


def launch(kind: str, shape: TileShape, start: Callable[[TileShape], None]) -> None:
    """Starts a kernel in a shape, or in the first smaller one that the device has room for; `kind` names the
    product in the log. Raises what Triton raises when there is none.
    """
    while (kind, shape) in _smaller:
        shape = _smaller[kind, shape]
    try:
        start(shape)
    except OutOfResources as error:
        _smaller[kind, shape] = next_smaller(kind, shape, error)
        launch(kind, shape, start)


def next_smaller(kind: str, shape: TileShape, refusal: OutOfResources) -> TileShape:
    """What to try where a device has no room for a shape. Raises `refusal` when nothing is left."""
    if shape.num_stages > 1:
        smaller = replace(shape, num_stages=shape.num_stages - 1)
    elif shape.outputs > NARROW_TILE:
        smaller = replace(shape, outputs=NARROW_TILE, num_warps=shape.num_warps // 2)
    else:
        raise refusal
    _log.warning("linear: no room for %s of %s (%s); %s takes its place", shape, kind, refusal, smaller)
    return smaller
