"""top-k, top-p and min-p: which tokens stay in the draw. Shape letters: R rows, V vocabulary.

All three keep every token at or above a threshold, so equal logits stay or go together and the result does
not depend on the order of a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The best so many tokens usually hold top_p of the mass; only when they do not is the whole row sorted.
CANDIDATES = 512


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less likely than min_p [R] times the most likely one. logits [R, V] -> [R, V]."""
    threshold = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None]
    return logits.masked_fill(logits < threshold, float("-inf"))


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the top_k [R] best tokens (0 keeps all), then of these the fewest that hold top_p [R] of the
    mass.
    """
    vocab_size = logits.shape[1]
    keep = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    num_candidates = min(vocab_size, max(CANDIDATES, int(torch.where(top_k > 0, keep, 0).max())))
    threshold, complete = _thresholds(logits, keep, top_p, num_candidates)
    if not bool(complete.all()):
        rows = (~complete).nonzero()[:, 0]
        threshold[rows] = _thresholds(logits[rows], keep[rows], top_p[rows], vocab_size)[0]
    return logits.masked_fill(logits < threshold[:, None], float("-inf"))


def _thresholds(logits: Tensor, keep: Tensor, top_p: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Smallest logit that stays [R], and whether the candidates sufficed to know it [R]."""
    best = torch.topk(logits, num_candidates, dim=-1).values  # [R, candidates], best first
    rank = torch.arange(num_candidates, device=logits.device)
    inside = rank < keep[:, None]
    # With all tokens kept, the mass is that of the whole row; else that of the kept ones.
    whole = torch.logsumexp(logits.double(), -1)
    kept = torch.logsumexp(best.double().masked_fill(~inside, float("-inf")), -1)
    total = torch.where(keep >= logits.shape[1], whole, kept)
    mass = torch.exp(best.double() - total[:, None]).masked_fill(~inside, 0.0).cumsum(-1)
    # A token stays while the mass before it is below top_p; the first always does.
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    stays = inside & ((before < top_p.double()[:, None]) | (top_p >= 1.0)[:, None])
    stays[:, 0] = True
    last = stays.sum(-1) - 1
    threshold = best.gather(1, last[:, None])[:, 0]
    unlimited = (keep >= logits.shape[1]) & (top_p >= 1.0)
    threshold = threshold.masked_fill(unlimited, float("-inf"))
    enough = (mass[:, -1] >= top_p) | (keep <= num_candidates) | unlimited
    return threshold, enough
