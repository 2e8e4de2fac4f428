"""One draw per row, over all rows of a step at once.

Order: penalties, biases and allowed tokens, stop tokens before min_tokens, grammar; then temperature, min-p,
top-k, top-p; then Gumbel-max with counter-based noise, or the most likely token where the temperature is 0. A
feature that no row uses costs nothing, and no feature looks at more than its own row.

On a CPU the native kernels do all of it where they can be had; `kernels.sampling.reference` is theirs.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.sampling.table import SamplingTable
from kernels.host import Values, on_host
from kernels.sampling.native import NativeDraws, sampling_library
from kernels.sampling.rows import Drawn, SamplingRows

if TYPE_CHECKING:
    from torch import Tensor


def sample(logits: Values, table: SamplingTable, rows: SamplingRows) -> Drawn:
    """Draws one token per row of logits [R, V] (float32, left as it is)."""
    library = sampling_library() if table.native and on_host(logits) is not None else None
    if table.backend == "triton":
        from kernels.sampling.on_device import sample_on_device

        return sample_on_device(cast("Tensor", logits), table, rows).fetched()
    if library is None:
        from kernels.sampling.reference import sample_by_torch

        return sample_by_torch(cast("Tensor", logits), table, rows)
    if table.draws is None:
        table.draws = NativeDraws(library)
    tokens, finite, allowed, processed = table.draws.draw(logits, table, rows)
    return Drawn(tokens=tokens, finite=finite, allowed=allowed, processed=processed)
