"""Log-probabilities as the model gave them: before temperature, penalties and masks.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.types import TokenLogprobs
from kernels.host import Values, on_host
from kernels.sampling.native import native_logprobs, sampling_library

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(
    logits: Values,
    tokens: list[int],
    num_alternatives: list[int],
    excluded: Values | None = None,
    *,
    native: bool,
) -> list[TokenLogprobs]:
    """Reports for tokens [R] under logits [R, V], each with its number of most likely alternatives.

    Tokens that are excluded [R, V] are no alternatives; fewer are reported where too few are left. `native`:
    the native kernels may be used.
    """
    library = sampling_library() if native and on_host(logits) is not None else None
    if library is not None:
        chosen, ids, values = native_logprobs(library, logits, tokens, max(num_alternatives), excluded)
    else:
        from kernels.sampling.reference import logprobs_by_torch

        chosen, ids, values = logprobs_by_torch(
            cast("Tensor", logits), tokens, max(num_alternatives), cast("Tensor | None", excluded)
        )
    return [
        TokenLogprobs(token, chosen[row], tuple(ids[row][:count]), tuple(values[row][:count]))
        for row, (token, count) in enumerate(zip(tokens, num_alternatives, strict=True))
    ]
