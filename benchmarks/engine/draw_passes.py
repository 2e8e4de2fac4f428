"""What a draw on a GPU asks of it, counted without one: launches, reads of the row, and the longest chain of
reads that wait for each other.

Kernels run in Triton's interpreter, which says what every program loads. A chain is the sum over launches of
the most blocks that one program loads one after the other, since launches wait for each other as well; a row
is so many blocks long. Counts are of one row; rows do not wait for each other.

    TRITON_INTERPRET=1 python -m benchmarks.engine.draw_passes [--json OUT]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from benchmarks.engine.report import Row, arguments, publish
from engine.sampling.table import SamplingTable
from engine.types import SamplingParams
from kernels.sampling.on_device import sample_on_device
from kernels.sampling.rows import SamplingRows

_VOCAB = 128_256
_CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, top-k 50": SamplingParams(temperature=0.7, top_k=50),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 0.7, top-p 0.9, top-k 50": SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
}
# As a model gives them: a few likely tokens over a wide bell.
_LOGITS = {
    "few likely": lambda row: torch.cat((row[:40] * 2 + 12, row[40:] * 2)),
    "wide": lambda row: row,
    "equal": torch.zeros_like,
}
_NOTES = "launches include torch's own; the copy of what rows ask for is left out"
# Operations of torch that launch nothing.
_VIEWS = ("empty", "new_empty", "set_", "lift_fresh", "view", "slice", "detach", "unbind")


@dataclass
class Count:
    """Of one draw."""

    launches: int = 0
    elements: int = 0
    chain: int = 0


class _Operations(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.name().removeprefix("aten::").startswith(_VIEWS):
            self._count.launches += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(row: Tensor) -> Iterator[Count]:
    """Counts what kernels load meanwhile, and how much of it is `row` [V] itself."""
    count = Count()
    begin = row.data_ptr()
    end = begin + row.numel() * row.element_size()
    # Blocks that the program which runs has loaded, and the most of any program of its launch.
    chains = [0, 0]
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    plain: dict[tuple[Any, str], Callable[..., Any]] = {
        (builder, "create_masked_load"): builder.create_masked_load,
        (builder, "set_grid_idx"): builder.set_grid_idx,
        (executor, "__call__"): executor.__call__,
    }

    def load(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        if np.size(pointers.data) > 1:
            chains[0] += 1
            asked = np.asarray(pointers.data)[np.asarray(mask.data, bool)]
            count.elements += int(((asked >= begin) & (asked < end)).sum())
        return plain[builder, "create_masked_load"](self, pointers, mask, *options)

    def begin_program(self: Any, *place: int) -> None:
        chains[:] = [0, max(chains)]
        plain[builder, "set_grid_idx"](self, *place)

    def launch(self: Any, *given: Any, **options: Any) -> Any:
        chains[:] = [0, 0]
        # What the interpreter does with tensors is none of the draw's operations.
        launches = count.launches + 1
        done = plain[executor, "__call__"](self, *given, **options)
        count.launches = launches
        count.chain += max(chains)
        return done

    for (owner, name), wrapped in zip(plain, (load, begin_program, launch), strict=True):
        setattr(owner, name, wrapped)
    try:
        with _Operations(count):
            yield count
    finally:
        for (owner, name), method in plain.items():
            setattr(owner, name, method)


def measure(shape: str, name: str) -> Row:
    """Counts of one draw from one row."""
    table = SamplingTable(_VOCAB, torch.device("cpu"))
    table.grow(1)
    nothing = np.array([], np.int64)
    table.put(0, _CASES[name], 0, nothing, nothing)
    logits = _LOGITS[shape](torch.randn(_VOCAB, generator=torch.Generator().manual_seed(0)))[None]
    rows = SamplingRows(slots=np.array([0]), positions=np.array([3]))
    with counting(logits) as count:
        sample_on_device(logits, table, rows).packed()
    return {
        "row": shape,
        "asked": name,
        "launches": count.launches,
        "reads of the row": count.elements / _VOCAB,
        "reads in a chain": count.chain,
    }


def main() -> None:
    """Every kind of row with every option."""
    options = arguments(__doc__ or "")
    rows = [measure(shape, name) for shape in _LOGITS for name in _CASES]
    publish(f"A draw from one row of {_VOCAB:,} logits", rows, options.json, _NOTES)


if __name__ == "__main__":
    main()
