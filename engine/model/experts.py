"""Sparse feed-forward layers in torch: a router picks experts for each token.

Each expert computes its own tokens, padded to 16 rows, and a token adds its experts in its own fixed order;
so no token's result depends on who else chose the same expert.

Shape letters: T tokens, E hidden size, A active experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.layers import feed, multiply
from engine.model.records import FeedForward, SparseFeedForward
from kernels.adapters.backends import AdapterStep
from kernels.experts.reference import route
from kernels.linear.rows import ROW_MULTIPLE
from kernels.selection import Kernels

if TYPE_CHECKING:
    from kernels.experts.grouped import ExpertsTogether


def experts_together(experts: list[FeedForward], kernels: Kernels) -> ExpertsTogether | None:
    """The experts as the back end groups them, or None where it cannot: without gates, for example."""
    if experts[0].plain:
        return None
    gate_up = kernels.linear.grouped([expert.gate_up.weight for expert in experts])
    if gate_up is None:
        return None
    down = kernels.linear.grouped([expert.down.weight for expert in experts])
    if down is None:
        return None
    # Triton is there where experts are grouped, and perhaps only there.
    from kernels.experts.grouped import ExpertsTogether

    gate_biases = [expert.gate_up.bias for expert in experts if expert.gate_up.bias is not None]
    down_biases = [expert.down.bias for expert in experts if expert.down.bias is not None]
    biases = (torch.cat(gate_biases), torch.cat(down_biases)) if gate_biases else None
    return ExpertsTogether(gate_up, down, biases)


def feed_sparse(
    sparse: SparseFeedForward,
    x: Tensor,
    kernels: Kernels,
    adapters: AdapterStep | None = None,
    *,
    asked: Tensor | None = None,
) -> Tensor:
    """x [T, E] -> [T, E]; adapters change what all tokens share. The router takes x, or what it is `asked`
    [T, E].
    """
    logits = multiply(sparse.router, (x if asked is None else asked).float())
    shared = None if sparse.shared is None else feed(sparse.shared, x, kernels, adapters)
    if shared is not None and sparse.shared_gate is not None:
        gate = multiply(sparse.shared_gate, x.float())
        shared = shared * (1.0 / (1.0 + torch.exp(-gate))).to(x.dtype)
    if sparse.latent_in is None or sparse.latent_out is None:
        return _routed(sparse, x, logits, kernels, shared)
    given = _routed(sparse, multiply(sparse.latent_in, x, adapters), logits, kernels, None)
    out = multiply(sparse.latent_out, given, adapters)
    return out if shared is None else out + shared


def _routed(
    sparse: SparseFeedForward, x: Tensor, logits: Tensor, kernels: Kernels, shared: Tensor | None
) -> Tensor:
    """What the chosen experts make of x [T, E], which the router gave logits [T, X], plus what is shared."""
    correction = cast("Tensor | None", sparse.correction)
    scales = cast("Tensor | None", sparse.expert_scales)
    if sparse.together is not None:
        out: Tensor = sparse.together(
            x,
            logits,
            sparse.spec,
            correction=correction,
            scales=scales,
            activation=sparse.activation,
            shared=shared,
        )
        return out
    ids, shares = route(logits, sparse.spec, correction)
    shares = shares if scales is None else shares * scales[ids]
    num_active = ids.shape[1]
    each = _in_turn(sparse, x, ids, shares, kernels).view(-1, num_active, x.shape[1]).float()
    if not sparse.spec.weighs_inputs:
        each = each * shares[..., None]
    total = each[:, 0]
    for place in range(1, num_active):
        total = total + each[:, place]
    out = total.to(x.dtype)
    return out if shared is None else out + shared


def _in_turn(sparse: SparseFeedForward, x: Tensor, ids: Tensor, shares: Tensor, kernels: Kernels) -> Tensor:
    """x [T, E], ids and shares [T, A] -> [T * A, E]; the host learns how many rows each expert has."""
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
        rows = x.index_select(0, places // num_active)
        if sparse.spec.weighs_inputs:
            rows = rows * shares.flatten()[places, None].to(x.dtype)
        rows = F.pad(rows, (0, 0, 0, -count % ROW_MULTIPLE))
        results[places] = feed(expert, rows, kernels)[:count]
    return results
