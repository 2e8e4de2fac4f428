"""Draws as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.sampling.triton_sampling import compile_draw


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every combination of options over Llama's vocabulary."""
    yield "draw", partial(compile_draw, 128_256, torch.device("meta"))
