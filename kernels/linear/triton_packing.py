"""How weights of 4 and 8 bits lie in memory for Triton's products: what a matrix unit's lanes take is one
16-bit word, so that words go from memory to the lanes as they are, and shifts and masks make numbers of them.

Inputs go in steps. Word w of a step holds the levels of its inputs w, W + w, ... (W words make a step of 4 W
inputs of 4 bits, or 2 W of 8), lowest bits first; the words of a step lie side by side, outputs after one
another, then the next step. So a program reads what it needs in whole stretches.

Shape letters: N outputs, K inputs, G groups of inputs, B steps, W words of an output and step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.formats import INT4_MIDDLE, Int4Weight, Int8Weight

# Inputs of a step: as many share a scale, or else half of them.
STEPS = (128, 64)
# Fewest inputs (K) that a matrix unit multiplies.
SMALLEST_DOT = 16
# Outputs that are arranged at a time.
PIECE_OUTPUTS = 4096


@dataclass(frozen=True, kw_only=True)
class PackedLevels:
    """A weight [N, K]: output n and input k have (level - zero) * scale of their group, or, with a minimum
    instead of a zero, (level - middle) * scale + minimum.
    """

    words: Tensor  # [B, N, W] int16
    bits: int
    inputs: int
    group: int  # inputs that share a scale; a step or more where it is all of them
    # [G, N] in the narrowest type that holds them exactly; zeros are whole numbers.
    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None
    smoothing: Tensor | None = None  # [K] float32
    order: Tensor | None = None  # [K] int64

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.words.shape[1], self.inputs

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return self.words.shape[2] * 16 // self.bits

    @property
    def offset(self) -> tuple[str, Tensor]:
        """ "zero", "minimum" or "none", and the numbers, for which scales stand in where there are none."""
        if self.zero is not None:
            return "zero", self.zero
        return ("none", self.scale) if self.minimum is None else ("minimum", self.minimum)

    @property
    def scales_per_step(self) -> int:
        """1, 2, or with 4 bits also 4: as many as its inputs need at most."""
        return next(parts for parts in (1, 2, 4) if self.group % (self.step // parts) == 0)


def pack_levels_for_triton(weight: Int4Weight | Int8Weight) -> PackedLevels:
    """Raises ValueError for groups of inputs that no matrix unit takes."""
    bits = 4 if isinstance(weight, Int4Weight) else 8
    step = _step_of(weight, bits)
    zero, minimum = _offsets(weight) if isinstance(weight, Int4Weight) else (None, None)
    num_groups, steps = weight.scale.shape[1], -(-weight.shape[1] // step)
    return PackedLevels(
        words=_words(weight, bits, step),
        bits=bits,
        inputs=weight.shape[1],
        # One group is as long as the steps that cover it.
        group=weight.group_size if num_groups > 1 else steps * step,
        scale=_by_group(weight.scale, steps * step, weight.group_size),
        zero=None if zero is None else _by_group(zero, steps * step, weight.group_size),
        minimum=None if minimum is None else _by_group(minimum, steps * step, weight.group_size),
        smoothing=weight.smoothing if isinstance(weight, Int8Weight) else None,
        order=weight.order,
    )


def _step_of(weight: Int4Weight | Int8Weight, bits: int) -> int:
    size = weight.group_size
    if weight.scale.shape[1] == 1:
        return STEPS[0]
    for step in STEPS:
        if size % step == 0 or size % (step * bits // 16) == 0:
            return step
    raise ValueError(
        f"a weight of {bits} bits has groups of {size} inputs: Triton multiplies groups of a multiple of "
        f"{SMALLEST_DOT * bits // 4}; set engine.kernels.linear to torch"
    )


def _words(weight: Int4Weight | Int8Weight, bits: int, step: int) -> Tensor:
    """[N, K] in their format -> [B, N, W], a piece at a time: whole numbers take room."""
    num_outputs, num_inputs = weight.shape
    num_steps, per_word = -(-num_inputs // step), 16 // bits
    words = torch.empty(
        num_steps, num_outputs, step // per_word, dtype=torch.int16, device=weight.scale.device
    )
    shifts = bits * torch.arange(per_word, dtype=torch.int32, device=words.device)
    for first in range(0, num_outputs, PIECE_OUTPUTS):
        part = slice(first, first + PIECE_OUTPUTS)
        if isinstance(weight, Int4Weight):
            levels = torch.stack((weight.packed[part] & 15, weight.packed[part] >> 4), dim=-1).flatten(1)
        else:
            # From 0 to 255.
            levels = weight.values[part].view(torch.uint8) ^ 128
        levels = F.pad(levels, (0, num_steps * step - num_inputs))
        parted = levels.view(-1, num_steps, per_word, step // per_word).int() << shifts[:, None]
        words[:, part] = parted.sum(2, dtype=torch.int32).to(torch.int16).transpose(0, 1)
    return words


def _offsets(weight: Int4Weight) -> tuple[Tensor | None, Tensor | None]:
    """Zeros [N, G] where minima are whole numbers of scales, as most checkpoints store them; else what is
    added to levels that are taken from the middle.
    """
    minimum, scale = weight.minimum, weight.scale
    if minimum is None:
        return None, None
    if minimum.device.type != "meta":
        zero = torch.where(scale == 0, 0.0, -minimum / scale).round()
        if torch.equal(-zero * scale, minimum) and bool(((zero >= 0) & (zero < 128)).all()):
            return zero, None
    return None, minimum + INT4_MIDDLE * scale


def _by_group(numbers: Tensor, padded: int, group: int) -> Tensor:
    """[N, G] float32 -> [G, N] in the narrowest type that holds them all, and zeros for groups of inputs that
    only steps have.
    """
    more = max(0, -(-padded // group) - numbers.shape[1]) if numbers.shape[1] > 1 else 0
    transposed = F.pad(numbers, (0, more)).t().contiguous()
    if transposed.device.type != "meta":
        for kind in (torch.float16, torch.bfloat16):
            narrow = transposed.to(kind)
            if torch.equal(narrow.float(), transposed):
                return narrow
    return transposed
