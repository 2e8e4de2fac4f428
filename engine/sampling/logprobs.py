"""Log-probabilities as the model gave them: before temperature, penalties and masks.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.types import TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: list[int], num_alternatives: list[int], excluded: Tensor | None = None
) -> list[TokenLogprobs]:
    """Reports for tokens [R] under logits [R, V], each with its number of most likely alternatives.

    Tokens that are excluded [R, V] are no alternatives; fewer are reported where too few are left.
    """
    normalized = torch.log_softmax(logits, dim=-1)
    chosen = normalized.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    most = max(num_alternatives)
    if most == 0:
        return [TokenLogprobs(token, value) for token, value in zip(tokens, chosen, strict=True)]
    eligible = normalized if excluded is None else normalized.masked_fill(excluded, float("-inf"))
    best = torch.topk(eligible, min(most, logits.shape[1]), dim=-1)
    values = [[value for value in row if value > float("-inf")] for row in best.values.tolist()]
    ids = best.indices.tolist()
    return [
        TokenLogprobs(
            token, chosen[row], tuple(ids[row][: len(values[row])][:count]), tuple(values[row][:count])
        )
        for row, (token, count) in enumerate(zip(tokens, num_alternatives, strict=True))
    ]
