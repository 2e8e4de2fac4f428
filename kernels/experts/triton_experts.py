"""The choice of experts, and the sum of what they found, in one launch each: `reference` in Triton.

Shape letters: T tokens, E hidden size, X experts, A active experts, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.routing import Routing

SCORINGS = {"softmax": 0, "softmax_of_best": 1, "sigmoid": 2, "sparse_mixer": 3}
# Elements of a token that one program adds up.
BLOCK = 1024
# Above what is taken already.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _softmax(values):
    """Of a row; minus infinity is no part of it."""
    powers = tl.exp(values - tl.max(values, axis=0))
    return powers / tl.sum(powers, axis=0)


@triton.jit
def _in_best_groups(
    scores, expert, SIZE: tl.constexpr, ACTIVE: tl.constexpr, NUM: tl.constexpr, BEST: tl.constexpr
):
    """scores [X] with those outside the ACTIVE best of NUM groups of SIZE set to minus infinity. A group is
    judged by the sum of its BEST best.
    """
    group = expert // SIZE
    merit = tl.full(scores.shape, float("-inf"), tl.float32)
    for index in tl.static_range(NUM):
        left = tl.where(group == index, scores, float("-inf"))
        total = tl.max(left, axis=0)
        for _ in tl.static_range(1, BEST):
            left = tl.where(expert == tl.argmax(left, axis=0), float("-inf"), left)
            total += tl.max(left, axis=0)
        merit = tl.where(group == index, total, merit)
    kept = tl.full(scores.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(ACTIVE):
        best = tl.argmax(merit, axis=0) // SIZE
        kept = tl.where(group == best, scores, kept)
        merit = tl.where(group == best, float("-inf"), merit)
    return kept


@triton.jit
def _best(scores, eligible, expert, there, ACTIVE: tl.constexpr, PLACES: tl.constexpr):
    """The ACTIVE best of `eligible`, and their scores; zeros fill PLACES up."""
    offset = tl.arange(0, PLACES)
    chosen, share = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    left = tl.where(there, tl.maximum(eligible, LOWEST), float("-inf"))
    for index in tl.static_range(ACTIVE):
        best = tl.argmax(left, axis=0).to(tl.int32)
        # Nobody is taken twice, whatever the numbers.
        left = tl.where(expert == best, float("-inf"), left)
        chosen = tl.where(offset == index, best, chosen)
        share = tl.where(offset == index, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), share)
    return chosen, share


@triton.jit
def _mixed_sparsely(values, expert, there, tolerance, ACTIVE: tl.constexpr, PLACES: tl.constexpr):
    """The ACTIVE best, each weighed by a softmax over what is left and near it; zeros fill PLACES up."""
    offset = tl.arange(0, PLACES)
    chosen, share = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    left = tl.where(there, tl.where(values <= float("inf"), values, float("inf")), float("-inf"))
    for index in tl.static_range(ACTIVE):
        best = tl.argmax(left, axis=0).to(tl.int32)
        most = tl.sum(tl.where(expert == best, values, 0.0), axis=0)
        far = (most - values) / tl.maximum(tl.abs(values), most) > tolerance
        near = tl.where(far | (left == float("-inf")), 0.0, tl.exp(values - most))
        chosen = tl.where(offset == index, best, chosen)
        share = tl.where(offset == index, 1.0 / tl.sum(near, axis=0), share)
        left = tl.where(expert == best, float("-inf"), left)
    return chosen, share


@triton.jit
def route_kernel(
    logits,
    correction,
    ids,
    shares,
    scaling,
    tolerance,
    experts,
    SCORING: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ACTIVE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One program per token. Of equal experts the first is chosen; NaN comes before everything."""
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = expert < experts
    values = tl.load(logits + token * experts + expert, mask=there, other=float("-inf"))
    if SCORING == 0:
        scores = _softmax(values)
    elif SCORING == 2:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        scores = values
    eligible = scores
    if CORRECTED:
        eligible += tl.load(correction + expert, mask=there, other=0.0)
    eligible = tl.where(eligible <= float("inf"), eligible, float("inf"))
    eligible = tl.where(there, eligible, float("-inf"))
    if NUM_GROUPS > 0:
        eligible = _in_best_groups(eligible, expert, GROUP_SIZE, ACTIVE_GROUPS, NUM_GROUPS, GROUP_BEST)
    if SCORING == 3:
        chosen, share = _mixed_sparsely(values, expert, there, tolerance, ACTIVE, PLACES)
    else:
        chosen, share = _best(scores, eligible, expert, there, ACTIVE, PLACES)
    offset = tl.arange(0, PLACES)
    if SCORING == 1:
        share = _softmax(tl.where(offset < ACTIVE, share, float("-inf")))
    elif SCORING != 3:
        if NORMALIZED:
            share = share / (tl.sum(share, axis=0) + 1e-20)
        share = share * scaling
    tl.store(ids + token * ACTIVE + offset, chosen, mask=offset < ACTIVE)
    tl.store(shares + token * ACTIVE + offset, share, mask=offset < ACTIVE)


def route(logits: Tensor, experts: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As in reference.route; ids are int32."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, experts.num_active, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, experts.num_active, dtype=torch.float32, device=logits.device)
    # The best alone take part in their softmax: there is nothing to correct, nor groups.
    plain = experts.scoring in ("softmax_of_best", "sparse_mixer")
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits,
            logits if correction is None else correction,
            ids,
            shares,
            experts.scaling,
            experts.tolerance,
            num_experts,
            SCORING=SCORINGS[experts.scoring],
            CORRECTED=correction is not None and not plain,
            NORMALIZED=experts.normalized,
            ACTIVE=experts.num_active,
            NUM_GROUPS=0 if plain else experts.num_groups,
            GROUP_SIZE=num_experts // max(1, experts.num_groups),
            ACTIVE_GROUPS=experts.num_active_groups,
            GROUP_BEST=1 if experts.group_score == "best" else 2,
            BLOCK=triton.next_power_of_2(num_experts),
            PLACES=triton.next_power_of_2(experts.num_active),
            num_warps=1,
        )
    return ids, shares


@triton.jit
def combine_kernel(
    results, shares, shared, out, size, ACTIVE: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per token and BLOCK elements: its experts in its own order, then what all tokens pass."""
    token = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(ACTIVE):
        row = token * ACTIVE + index
        found = tl.load(results + row * size + offset, mask=inside, other=0.0).to(tl.float32)
        total += found * tl.load(shares + row)
    total = total.to(out.dtype.element_ty)
    if SHARED:
        more = tl.load(shared + token * size + offset, mask=inside, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + more).to(out.dtype.element_ty)
    tl.store(out + token * size + offset, total, mask=inside)


def combine(results: Tensor, shares: Tensor, shared: Tensor | None = None) -> Tensor:
    """results [T * A, E], each token's experts side by side, shares [T, A], shared [T, E] -> [T, E]."""
    (num_tokens, active), size = shares.shape, results.shape[1]
    out = torch.empty(num_tokens, size, dtype=results.dtype, device=results.device)
    if num_tokens:
        combine_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            results,
            shares,
            results if shared is None else shared.contiguous(),
            out,
            size,
            ACTIVE=active,
            SHARED=shared is not None,
            BLOCK=BLOCK,
        )
    return out
