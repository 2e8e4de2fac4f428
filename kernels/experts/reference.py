"""The choice of experts in torch: what GPUs compute with, and the reference of the native op.

Shape letters: T tokens, X experts, A active experts, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.experts.routing import Routing


def route(logits: Tensor, experts: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The router's logits [T, X] in float32 -> ids [T, A] and weights [T, A] of the active experts."""
    if experts.scoring == "softmax_of_best":
        best = torch.topk(logits, experts.num_active, dim=-1)
        return best.indices, torch.softmax(best.values, -1)
    if experts.scoring == "sparse_mixer":
        return _sparse_mixer(logits, experts)
    scores = torch.softmax(logits, -1) if experts.scoring == "softmax" else 1.0 / (1.0 + torch.exp(-logits))
    eligible = scores if correction is None else scores + correction
    if experts.num_groups:
        eligible = _best_groups(eligible, experts)
    ids = torch.topk(eligible, experts.num_active, dim=-1).indices
    chosen = scores.gather(1, ids)
    if experts.normalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return ids, chosen * experts.scaling


def _sparse_mixer(logits: Tensor, experts: Routing) -> tuple[Tensor, Tensor]:
    """Each choice is the best of what is left, weighed by a softmax over what is left and near it."""
    left, ids, weights = logits, [], []
    for _ in range(experts.num_active):
        best = left.argmax(-1, keepdim=True)
        most = left.gather(1, best)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > experts.tolerance
        near = torch.softmax(left.masked_fill(is_far, float("-inf")), -1)
        ids.append(best)
        weights.append(near.gather(1, best))
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


def _best_groups(scores: Tensor, experts: Routing) -> Tensor:
    """scores [T, X] with those outside the best groups of each token set to minus infinity."""
    grouped = scores.view(scores.shape[0], experts.num_groups, -1)  # [T, G, X/G]
    if experts.group_score == "best":
        merit = grouped.amax(-1)
    else:
        merit = torch.topk(grouped, 2, dim=-1).values.sum(-1)
    best = torch.topk(merit, experts.num_active_groups, dim=-1).indices
    closed = torch.ones_like(merit, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
