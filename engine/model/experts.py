"""Sparse feed-forward layers: a router picks experts for each token.

Each expert computes its own tokens, padded to 16 rows, and a token adds its experts in its own fixed order;
so no token's result depends on who else chose the same expert.

Shape letters: T tokens, E hidden size, X experts, A active experts, I intermediate size, G groups.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.linear import ROW_MULTIPLE, GroupedProduct
from engine.kernels.selection import Kernels
from engine.model.layers import feed, multiply
from engine.model.records import FeedForward, SparseFeedForward
from engine.model.spec import ExpertSpec


def route(logits: Tensor, experts: ExpertSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The router's logits [T, X] in float32 -> ids [T, A] and weights [T, A] of the active experts."""
    if experts.scoring == "softmax_of_best":
        best = torch.topk(logits, experts.num_active, dim=-1)
        return best.indices, torch.softmax(best.values, -1)
    scores = torch.softmax(logits, -1) if experts.scoring == "softmax" else 1.0 / (1.0 + torch.exp(-logits))
    eligible = scores if correction is None else scores + correction
    if experts.num_groups:
        eligible = _best_groups(eligible, experts)
    ids = torch.topk(eligible, experts.num_active, dim=-1).indices
    chosen = scores.gather(1, ids)
    if experts.normalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return ids, chosen * experts.scaling


def _best_groups(scores: Tensor, experts: ExpertSpec) -> Tensor:
    """scores [T, X] with those outside the best groups of each token set to minus infinity."""
    grouped = scores.view(scores.shape[0], experts.num_groups, -1)  # [T, G, X/G]
    if experts.group_score == "best":
        merit = grouped.amax(-1)
    else:
        merit = torch.topk(grouped, 2, dim=-1).values.sum(-1)
    best = torch.topk(merit, experts.num_active_groups, dim=-1).indices
    closed = torch.ones_like(merit, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)


class ExpertsTogether:
    """All experts of a layer in two grouped products, so that the host need not know who chose whom."""

    def __init__(
        self, experts: list[FeedForward], gate_up: GroupedProduct, down: GroupedProduct, kernels: Kernels
    ) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, kernels.gate
        self._biases: tuple[Tensor, Tensor] | None = None  # [X, 2 I], [X, E]
        gate_biases = [expert.gate_up.bias for expert in experts if expert.gate_up.bias is not None]
        down_biases = [expert.down.bias for expert in experts if expert.down.bias is not None]
        if gate_biases:
            self._biases = torch.stack(gate_biases), torch.stack(down_biases)

    @classmethod
    def of(cls, experts: list[FeedForward], kernels: Kernels) -> ExpertsTogether | None:
        """The experts as the back end groups them, or None where it cannot."""
        gate_up = kernels.linear.grouped([expert.gate_up.weight for expert in experts])
        if gate_up is None:
            return None
        down = kernels.linear.grouped([expert.down.weight for expert in experts])
        return None if down is None else cls(experts, gate_up, down, kernels)

    def __call__(self, x: Tensor, ids: Tensor, activation: str) -> Tensor:
        """x [T, E], ids [T, A] -> [T * A, E], each token's experts side by side."""
        flat = ids.flatten()
        groups = self._gate_up.group(flat.int())
        inner = self._gate_up(x, groups, rows_per_input=ids.shape[1])
        if self._biases is not None:
            inner = inner + self._biases[0].index_select(0, flat)
        out = self._down(self._gate(activation, inner), groups, rows_per_input=1)
        return out if self._biases is None else out + self._biases[1].index_select(0, flat)


def feed_sparse(sparse: SparseFeedForward, x: Tensor, kernels: Kernels) -> Tensor:
    """x [T, E] -> [T, E]."""
    logits = multiply(sparse.router, x.float())
    ids, shares = route(logits, sparse.spec, cast("Tensor | None", sparse.correction))
    num_active, together = ids.shape[1], sparse.together
    results = _in_turn(sparse, x, ids, kernels) if together is None else together(x, ids, sparse.activation)
    each = results.view(-1, num_active, x.shape[1]).float() * shares[..., None]
    total = each[:, 0]
    for place in range(1, num_active):
        total = total + each[:, place]
    out = total.to(x.dtype)
    return out if sparse.shared is None else out + feed(sparse.shared, x, kernels)


def _in_turn(sparse: SparseFeedForward, x: Tensor, ids: Tensor, kernels: Kernels) -> Tensor:
    """x [T, E], ids [T, A] -> [T * A, E]; the host learns how many rows each expert has."""
    num_active = ids.shape[1]
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=len(sparse.experts)).tolist()
    results = x.new_empty(order.shape[0], x.shape[1])
    start = 0
    for expert, count in zip(sparse.experts, counts, strict=True):
        if not count:
            continue
        places = order[start : start + count]
        start += count
        rows = F.pad(x.index_select(0, places // num_active), (0, 0, 0, -count % ROW_MULTIPLE))
        results[places] = feed(expert, rows, kernels)[:count]
    return results
