"""Log-probabilities as the model gave them: before temperature, penalties and masks.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.kernels.host import Values, on_host
from engine.sampling.native import native_logprobs, sampling_library
from engine.types import TokenLogprobs

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
        chosen, ids, values = logprobs_by_torch(
            cast("Tensor", logits), tokens, max(num_alternatives), cast("Tensor | None", excluded)
        )
    return [
        TokenLogprobs(token, chosen[row], tuple(ids[row][:count]), tuple(values[row][:count]))
        for row, (token, count) in enumerate(zip(tokens, num_alternatives, strict=True))
    ]


def logprobs_by_torch(
    logits: Tensor, tokens: list[int], num_best: int, excluded: Tensor | None
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """What `native_logprobs` reports, without native kernels."""
    import torch

    normalized = torch.log_softmax(logits, dim=-1)
    chosen = normalized.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    eligible = normalized if excluded is None else normalized.masked_fill(excluded, float("-inf"))
    best = torch.topk(eligible, min(num_best, logits.shape[1]), dim=-1)
    values = [[value for value in row if value > float("-inf")] for row in best.values.tolist()]
    ids = [row[: len(left)] for row, left in zip(best.indices.tolist(), values, strict=True)]
    return chosen, ids, values
