"""Counter-based randomness: the noise of a token is a pure function of (seed, choice, output position, token
id).

No generator has state, so a seeded request draws the same tokens whatever else is in the batch, after a
preemption, on another engine, and with speculation on or off. The function is splitmix64 (Steele, Lea, Flood,
OOPSLA 2014): a counter in steps of the golden ratio, mixed. Gumbel-max turns it into a draw: argmax(logit +
gumbel) is distributed as softmax(logits).

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_keys(
    seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[R] stream of each row. The three numbers are mixed one after another, so that neighbours are
    unrelated.
    """
    return _mix_in(sequence_streams(seeds, choices), positions).view(np.int64)


def sequence_streams(seeds: NDArray[np.uint64], choices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[R] what the keys of a sequence have in common: `row_keys` before the position is mixed in."""
    return _mix_in(_mix(seeds), choices)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """keys [R] int64 -> standard Gumbel noise [R, V] in float64."""
    import torch

    counter = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=keys.device) * _signed(_GOLDEN)
    bits = keys[:, None] + counter
    bits = (bits ^ _shift(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shift(bits, 27)) * _signed(_SECOND)
    bits = bits ^ _shift(bits, 31)
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix_in(state: NDArray[np.uint64], part: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _mix(state + (part.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    return state ^ (state >> np.uint64(31))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(bits: Tensor, offsets: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (bits >> offsets) & ((1 << (64 - offsets)) - 1)
