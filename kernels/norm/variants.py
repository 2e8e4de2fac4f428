"""Norms as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.norm.triton_norm import rms_norm


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """The residual stream of a layer, kept and rounded."""
    x = torch.empty(2, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, device="meta")
    yield "norm 4096", partial(rms_norm, x, weight, 1e-5, x)
    yield "norm 4096 to int8", partial(rms_norm, x, weight, 1e-5, x, "int8", weight)
    yield "norm 4096 to fp8", partial(rms_norm, x, weight, 1e-5, x, "fp8")
