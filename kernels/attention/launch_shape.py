"""Launch shapes of the attention kernel: measured ones, else such that nothing spills.

`tuning` holds what was measured, compile_ahead checks the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import triton
from triton.runtime.errors import OutOfResources

from kernels.attention.tuning import key_of, tuned_shape

# Fewest rows that a matrix unit multiplies.
SMALLEST_TILE = 16
# Largest tile, step, warps, stages: for keys of up to 128 numbers, and for larger ones.
WHOLE_SHAPES = ((128, 32, 8, 3), (64, 32, 8, 2))
# Converting a quantized cache takes registers.
QUANTIZED_WHOLE_SHAPE = (64, 32, 8, 3)
# Two groups of four warps keep Hopper's matrix units busy; the fifth stage is for the number of the block, so
# that two steps of keys and values are on their way. A step is a block of 64, or part of one.
HOPPER_WHOLE_SHAPES = ((128, 64, 8, 5), (128, 32, 8, 3))
SPLIT_SHAPES = ((64, 64, 4, 3), (64, 32, 8, 2))
# Eight warps have too few registers each for what a quantized cache of larger keys is converted to.
QUANTIZED_SPLIT_SHAPE = (64, 16, 4, 3)
# Codes of four bits of larger keys are unpacked in registers, of which more rows would leave none.
FOUR_BIT_WHOLE_SHAPE = (32, 32, 8, 2)
# For latent attention, whose keys have 576.
LATENT_SHAPE = (32, 32, 8, 2)
# Where 64 heads or more share them, sums of 64 heads take half of the registers: the history is read half as
# often as with 32, in shorter steps.
LATENT_SPLIT_SHAPE = (64, 16, 8, 3)
# Shapes for float32, which is multiplied without matrix units, by the largest size of a key.
WIDE_SHAPES = {64: (32, 16, 4, 2), 128: (32, 16, 8, 2), 256: (16, 16, 8, 2), 1024: (16, 16, 8, 1)}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchShape:
    """What a launch decides besides the model's own sizes."""

    heads: int  # query heads of a tile, which share their keys; a group may need several tiles
    tile: int  # rows: tokens times heads
    step: int  # positions of one pass through the inner loop
    num_warps: int
    num_stages: int


def launch_shape(
    *, group: int, key_dim: int, final: bool, kv: str, wide: bool = False, arch: str = ""
) -> LaunchShape:
    """The shape that was measured for an architecture, or one chosen such that no register spills on sm_80
    and sm_90 (benchmarks/gpu/compile_ahead). `kv` says how the cache is stored: "plain", "int8", "fp8",
    "kivi4"; `wide` that queries have four bytes.
    """
    largest, step, num_warps, num_stages = (
        WHOLE_SHAPES[key_dim > 128] if final else SPLIT_SHAPES[key_dim > 128]
    )
    if final and arch == "sm_90":
        largest, step, num_warps, num_stages = HOPPER_WHOLE_SHAPES[key_dim > 128]
    elif final and kv != "plain" and key_dim <= 128:
        largest, step, num_warps, num_stages = QUANTIZED_WHOLE_SHAPE
    if not final and kv != "plain" and key_dim > 128:
        largest, step, num_warps, num_stages = QUANTIZED_SPLIT_SHAPE
    if final and kv == "kivi4" and key_dim > 128:
        largest, step, num_warps, num_stages = FOUR_BIT_WHOLE_SHAPE
    if key_dim > 256:
        many = not final and kv == "plain" and group % LATENT_SPLIT_SHAPE[0] == 0
        largest, step, num_warps, num_stages = LATENT_SPLIT_SHAPE if many else LATENT_SHAPE
    if wide:
        largest, step, num_warps, num_stages = next(
            shape for size, shape in WIDE_SHAPES.items() if key_dim <= size
        )
    measured = tuned_shape(arch, key_of(final=final, key_dim=key_dim, group=group, kv=kv))
    if measured is not None and not wide:
        largest, step, num_warps, num_stages = measured
    heads = next(heads for heads in range(min(group, largest), 0, -1) if group % heads == 0)
    tile = largest if final else max(SMALLEST_TILE, triton.next_power_of_2(heads))
    return LaunchShape(heads=heads, tile=tile, step=step, num_warps=num_warps, num_stages=num_stages)


def next_smaller(shape: LaunchShape, refusal: OutOfResources) -> LaunchShape:
    """What to try where a device has no room for a shape: fewer stages, shorter steps, fewer rows. Raises
    `refusal` when nothing is left.
    """
    if shape.num_stages > 1:
        smaller = replace(shape, num_stages=shape.num_stages - 1)
    elif shape.step > SMALLEST_TILE:
        smaller = replace(shape, step=shape.step // 2)
    elif shape.tile > SMALLEST_TILE:
        tile = shape.tile // 2
        heads = next(heads for heads in range(min(shape.heads, tile), 0, -1) if shape.heads % heads == 0)
        smaller = replace(shape, tile=tile, heads=heads)
    else:
        raise refusal
    _log.warning("attention: no room for %s (%s); %s takes its place", shape, refusal, smaller)
    return smaller
