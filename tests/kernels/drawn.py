"""Random numbers, and weights of every format, for the tests of every back end."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quantization.gguf_blocks import IQ4_BOOK, TWICE_FP4_BOOK
from kernels.linear.formats import (
    CodedWeight,
    DenseWeight,
    FloatCodedWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
    pack_levels,
)

MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Of the normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def weight_of(
    kind: str, outputs: int, inputs: int, seed: int = 0, *, group: int | None = None, size: float = 1.0
) -> WeightFormat:
    """A random weight of a format, of numbers around `size`. By groups of so many inputs where it has them: 0
    is all of a row, and what int4 has otherwise is 32.
    """
    group = (32 if kind.startswith("int4") else 0) if group is None else group
    groups = (outputs, inputs // group if group else 1)
    if kind.startswith("int4"):
        has_minimum, order = "minimum" in kind, None
        if "order" in kind:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed + 2))
        return Int4Weight(
            packed=pack_levels(whole(0, 16, outputs, inputs, seed=seed)),
            scale=drawn(*groups, seed=seed).abs() * size / 8,
            minimum=drawn(*groups, seed=seed + 1) * size if has_minimum else None,
            order=order,
        )
    if "coded" in kind:
        return coded_weight(kind, outputs, inputs, seed, group=group or 32, size=size)
    if kind.startswith("fp8"):
        shape = (-(-outputs // 128), -(-inputs // 128)) if "blocks" in kind else (outputs,)
        values = drawn(outputs, inputs, seed=seed).to(torch.float8_e4m3fn)
        scale = drawn(*shape, seed=seed + 1).abs() * size
        return Fp8Weight(values=values, scale=scale, rounds_inputs="kept" not in kind)
    if kind == "mxfp4":
        levels = torch.tensor(MXFP4_LEVELS, dtype=torch.int8)
        values = levels[whole(0, len(MXFP4_LEVELS), outputs, inputs, seed=seed)]
        scale = 2.0 ** whole(-3, 0, outputs, inputs // 32, seed=seed + 1).float()
        return Int8Weight(values=values, scale=scale * size)
    if kind in ("int8", "w8a8", "smoothed w8a8"):
        return Int8Weight(
            values=whole(-127 if "w8a8" in kind else -128, 128, outputs, inputs, seed=seed).to(torch.int8),
            scale=drawn(*groups, seed=seed).abs() * size / 100,
            activations="int8" if "w8a8" in kind else "float",
            smoothing=drawn(inputs, seed=seed + 1).abs() + 0.5 if "smoothed" in kind else None,
        )
    return DenseWeight(values=(drawn(outputs, inputs, seed=seed) * size).to(getattr(torch, kind)))


CODED_KINDS = (
    *(f"coded {bits} bits" for bits in (2, 3, 4, 5, 6)),
    *(f"coded {bits} bits minimum" for bits in (2, 4, 5)),
    *("coded 4 bits book", "coded 4 bits powers", "coded 4 bits floats", "coded 5 bits plain minimum"),
)


def float_coded_weight(outputs: int, inputs: int, seed: int = 0, *, group: int) -> FloatCodedWeight:
    """Codes of 16 drawn floats."""
    return FloatCodedWeight(
        codes=whole(0, 16, outputs, inputs, seed=seed).to(torch.uint8),
        book=drawn(16, seed=seed + 1),
        scale=drawn(outputs, inputs // group, seed=seed + 2).abs(),
    )


def coded_weight(kind: str, outputs: int, inputs: int, seed: int, *, group: int, size: float) -> CodedWeight:
    """One of CODED_KINDS: codes for levels or for a book, with whole steps by spans, steps of another kind by
    rows, or none.
    """
    bits = int(kind.split()[1])
    shape, groups = (outputs, inputs), inputs // group
    by_rows = "powers" in kind or "floats" in kind or inputs % 256
    spans = groups if "plain" in kind else 1 if by_rows else inputs // 256
    book = tuple(range(-(1 << bits) // 2, (1 << bits) // 2))
    step = whole(-32, 64, outputs, groups, seed=seed + 1).to(torch.int8)
    if "powers" in kind:
        book, step = TWICE_FP4_BOOK, whole(120, 129, outputs, groups, seed=seed + 1).to(torch.uint8)
    elif "floats" in kind:
        book, step = TWICE_FP4_BOOK, drawn(outputs, groups, seed=seed + 1).abs().to(torch.float8_e4m3fn)
    elif "book" in kind:
        book = IQ4_BOOK
    has_minimum = "minimum" in kind
    low = whole(0, 64, outputs, groups, seed=seed + 3).to(torch.int8)
    return CodedWeight(
        codes=whole(0, 1 << bits, *shape, seed=seed).to(torch.uint8),
        bits=bits,
        book=book,
        scale=drawn(outputs, spans, seed=seed + 2).abs() * size / 16,
        step=None if "plain" in kind else step,
        minimum=drawn(outputs, spans, seed=seed + 4) * size / 16 if has_minimum else None,
        low=low if has_minimum and "plain" not in kind else None,
    )


def moved(weight: WeightFormat, device: torch.device) -> WeightFormat:
    """The same on another device."""
    parts = {name: part for name, part in vars(weight).items() if isinstance(part, Tensor)}
    return type(weight)(**{**vars(weight), **{name: part.to(device) for name, part in parts.items()}})
