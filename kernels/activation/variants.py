"""Gates as real models launch them: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.activation.triton_activation import KINDS, gate


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every gate over bfloat16."""
    x = torch.empty(2, 2 * 14336, dtype=torch.bfloat16, device="meta")
    for name in KINDS:
        yield f"gate {name}", partial(gate, name, x)
