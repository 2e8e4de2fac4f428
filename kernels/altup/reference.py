"""Alternating updates (AltUp, arXiv 2301.13310) in plain torch.

There are A streams. A layer predicts all of them from one another, computes one, and corrects all by what
that one became. How much, a small router says of each token.

Shape letters: T tokens, E hidden size, A streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Least mean square of a stream that is scaled.
SMALLEST = 1e-5


def coefficients(weight: Tensor, routed: Tensor) -> Tensor:
    """weight [N, A] by the router's answer [T, A] -> [T, N], of each row for itself."""
    return (routed[:, None] * weight).sum(-1)


def _mixed(streams: Tensor, shares: Tensor) -> Tensor:
    """The sum of the streams [A, T, E] by shares [T, A, 1], first to last; [T, E]."""
    total = streams[0] * shares[:, 0]
    for index in range(1, streams.shape[0]):
        total = total + streams[index] * shares[:, index]
    return total


def predicted(streams: Tensor, coefficients: Tensor) -> Tensor:
    """streams [A, T, E], coefficients [T, A * A] (what each prediction takes of each stream besides itself)
    -> [A, T, E].
    """
    shares = coefficients.view(-1, streams.shape[0], streams.shape[0], 1)
    mixed = [_mixed(streams, shares[:, index]) for index in range(streams.shape[0])]
    return (torch.stack(mixed) + streams).to(streams.dtype)


def corrected(predictions: Tensor, activated: Tensor, coefficients: Tensor, active: int) -> Tensor:
    """predictions [A, T, E] by what the `active` one became [T, E], coefficients [T, A] -> [A, T, E]."""
    innovation = activated - predictions[active]
    return (predictions + innovation * (coefficients + 1.0).T[..., None]).to(predictions.dtype)


def as_large_as(x: Tensor, other: Tensor) -> Tensor:
    """x [T, E], each row as large as that of the other [T, E], by their root mean squares."""
    wanted = other.float().square().mean(-1, keepdim=True).sqrt()
    found = x.float().square().mean(-1, keepdim=True).clamp(min=SMALLEST).sqrt()
    return (x * wanted / found).to(x.dtype)


def cut_off(gates: Tensor, deviations: float) -> Tensor:
    """gates [T, I], less what lies so many standard deviations above a row's mean, and none below that: few
    are left (arXiv 2506.06644).
    """
    wide = gates.float()
    mean = wide.mean(-1, keepdim=True)
    spread = (wide - mean).square().mean(-1, keepdim=True).sqrt()
    return (wide - (mean + spread * deviations)).clamp(min=0.0).to(gates.dtype)
