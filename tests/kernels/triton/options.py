"""What rows ask of the sampler, and what torch draws for them: for the tests of its kernels."""

from __future__ import annotations

import numpy as np
import torch

from kernels.sampling.noise import gumbel, row_keys
from kernels.sampling.reference import apply_min_p, apply_top_k_top_p
from kernels.sampling.triton_sampling import RowOptions

ROWS = 6


def options(**changes: torch.Tensor) -> RowOptions:
    """Plain draws of ROWS rows, each with noise of its own; or what is changed of that."""
    seeds = np.arange(ROWS, dtype=np.uint64) * np.uint64(0xFFFF_FFFF_FFFF) + np.uint64(5)
    keys = torch.from_numpy(row_keys(seeds, np.arange(ROWS) % 2, np.arange(ROWS) * 7))
    defaults = {
        "temperature": torch.ones(ROWS),
        "min_p": torch.zeros(ROWS),
        "top_k": torch.zeros(ROWS, dtype=torch.int32),
        "top_p": torch.ones(ROWS),
        "noise_keys": keys,
    }
    return RowOptions(**{**defaults, **changes})


def mixed_options() -> RowOptions:
    """Every filter, alone and with others, hot, cold and greedy."""
    return options(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.2]),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0, 0.1, 0.0]),
        top_k=torch.tensor([5, 0, 3, 40, 0, 1], dtype=torch.int32),
        top_p=torch.tensor([0.5, 0.3, 1.0, 0.9, 0.95, 1.0]),
    )


def on(device: torch.device, options: RowOptions) -> RowOptions:
    """The same on another device."""
    parts = {name: part for name, part in vars(options).items() if isinstance(part, torch.Tensor)}
    return RowOptions(**{name: part.to(device) for name, part in parts.items()})


def filtered_and_drawn(processed: torch.Tensor, chosen: RowOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's filters leave of processed logits over the temperature [R, V], and what it draws [R]."""
    warm = processed / torch.where(chosen.temperature > 0, chosen.temperature, 1.0)[:, None]
    filtered = apply_top_k_top_p(apply_min_p(warm, chosen.min_p), chosen.top_k.long(), chosen.top_p)
    noisy = filtered.double() + gumbel(chosen.noise_keys, processed.shape[1])
    return filtered, torch.where(chosen.temperature > 0, noisy.argmax(-1), processed.argmax(-1))
