"""Q4_K and Q6_K blocks by rounding to nearest: the `gguf` package reads these types and cannot make them.

N blocks of 256 numbers; layouts are those that `gguf.quants` undoes. What llama.cpp gains by a
search for better scales is not in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 256


def q6_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[..., 256 n] numbers to [..., 210 n] bytes: 16 groups of 16, scales of 8 bits times one float16."""
    groups = values.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=-1) / 31
    scale = (wanted.max(axis=-1, keepdims=True) / 127).astype(np.float16)
    steps = np.rint(_over(wanted, scale.astype(np.float32))).astype(np.int8)
    step = (scale.astype(np.float32) * steps)[..., None]
    levels = (np.clip(np.rint(_over(groups, step)), -32, 31) + 32).astype(np.uint8)
    # Halves of 128: lower bits of 64 numbers share bytes with those of the next 64, upper bits of four 32s.
    lower = levels.reshape(-1, 2, 2, 64) & 15
    upper = levels.reshape(-1, 2, 4, 32) >> 4
    low = lower[:, :, 0] | lower[:, :, 1] << 4
    high = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
    return _blocks(values, low, high, steps.view(np.uint8), scale.view(np.uint8))


def q4_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[..., 256 n] numbers to [..., 144 n] bytes: 8 groups of 32, their scales and minima in 6 bits."""
    groups = values.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(axis=-1), 0)
    wanted = (groups.max(axis=-1) + lowest) / 15
    scale = (wanted.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    offset = (lowest.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    steps = np.rint(_over(wanted, scale.astype(np.float32))).astype(np.uint8)
    minima = np.rint(_over(lowest, offset.astype(np.float32))).astype(np.uint8)
    step = (scale.astype(np.float32) * steps)[..., None]
    shifted = groups + (offset.astype(np.float32) * minima)[..., None]
    levels = np.clip(np.rint(_over(shifted, step)), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    # The first four of either in six bits each, the upper bits of the last four above them.
    packed = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (steps, minima)]
    packed.append(steps[:, 4:] & 15 | (minima[:, 4:] & 15) << 4)
    pairs = levels[:, :, 0] | levels[:, :, 1] << 4
    return _blocks(values, scale.view(np.uint8), offset.view(np.uint8), *packed, pairs)


def _over(values: NDArray[Any], step: NDArray[Any]) -> NDArray[Any]:
    """values / step, and 0 where the step is 0."""
    return np.divide(values, step, out=np.zeros_like(values, np.float32), where=step != 0)


def _blocks(values: NDArray[Any], *parts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    blocks = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    return blocks.reshape(*values.shape[:-1], -1)
