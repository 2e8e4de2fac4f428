"""Layers that carry a state from token to token, over slots of states. A back end is chosen once, by name.

Shape letters: S sequences, T tokens of all of them, C channels, W taps, H heads of values, G heads of keys,
K key dim, V value dim, D channels of a head, N slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.recurrent.rows import StateRows


class ScanWeights(NamedTuple):
    """What a layer has learned, and its constants."""

    rate: Tensor  # [H] negative
    bias: Tensor  # [H] of time steps; [H, K] of decays by channel
    skip: Tensor | None = None  # [H]
    # Of gains, with the delta rule; of time steps, without it.
    gain_scale: float = 1.0
    limits: tuple[float, float] = (0.0, float("inf"))
    # What exponents of decays by channel end at; 0: they are softplus's.
    floor: float = 0.0


class ScanInputs(NamedTuple):
    """What a scan takes in, in float32; rows may be apart. It is the delta rule where there are gains, and
    Mamba 2 where there are none.
    """

    queries: Tensor  # [T, G, K]
    keys: Tensor  # [T, G, K]
    values: Tensor  # [T, H, V]
    decays: Tensor  # [T, H]; with the delta rule also [T, H, K], one for each channel of keys
    gains: Tensor | None  # [T, H]


class SelectiveInputs(NamedTuple):
    """What Mamba's selective scan takes in, in float32."""

    x: Tensor  # [T, C]
    steps: Tensor  # [T, C]
    keys: Tensor  # [T, K]
    queries: Tensor  # [T, K]


class RgLruWeights(NamedTuple):
    """What a real-gated linear recurrent unit has learned, beside its gates' products."""

    bias: Tensor  # [H, 2 D] of gates
    rate: Tensor  # [C] negative


class RecurrentBackend(Protocol):
    """Computes from states in slots, and moves them on. A result depends neither on the batch nor on where a
    prompt was cut.
    """

    def place(
        self,
        states: StateRows,
        query_starts: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        num_rows: int,
        device: torch.device,
    ) -> Any:
        """Where the states of a step lie that has so many rows, padding included; for any layer."""

    def short_convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: Any, *, activates: bool
    ) -> Tensor:
        """x [T, C], whose rows may be apart -> [T, C] in float32; weight [W, C] over the last W inputs, bias
        [C]. `states` [N, W - 1, C] hold those before the step, and then those of its end. Padding rows stay
        zero.
        """

    def scan(self, inputs: ScanInputs, weights: ScanWeights, states: Tensor, step: Any) -> Tensor:
        """-> [T, H, V]; state = decay state + key (x) change, out = query . state + skip value; the change is
        gain value, or with the delta rule gain (value - key . decay state). `states` [N, H, K, V] as above.
        """

    def rg_lru(self, x: Tensor, gates: Tensor, weights: RgLruWeights, states: Tensor, step: Any) -> Tensor:
        """x [T, C], gates [T, H, 2 D] of inputs and of the recurrence, C = H D -> [T, C], all in float32:
        state = decay state + sqrt(1 - decay^2) taken, decay = exp(rate sigmoid(second gate)), taken =
        x sigmoid(first gate); a sequence begins with what it takes. `states` [N, H, 1, D] as above.
        """

    def selective_scan(
        self, inputs: SelectiveInputs, rate: Tensor, skip: Tensor, states: Tensor, step: Any
    ) -> Tensor:
        """-> [T, C]; of rate [K, C], negative, and skip [C]: state = e^(rate dt) state + key (x) dt x, out =
        query . state + skip x, where dt = softplus(steps). `states` [N, 1, K, C] as above.
        """

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        size: int,
        gate_first: bool,
        kind: str,
    ) -> Tensor:
        """norm(x) weight act(gate), or norm(x act(gate)) weight with `gate_first`, per group of `size`
        elements of x, gate [T, X], in float32; weight [X], or [size] for all groups; without one, it is
        x act(gate).
        """


BACKENDS = {
    "torch": "kernels.recurrent.reference:TorchRecurrent",
    "triton": "kernels.recurrent.triton_recurrent:TritonRecurrent",
}
