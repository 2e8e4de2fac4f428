"""Tables of rotary position embedding: cos and sin for every position, as a pure function of the position.

A table, and not frequencies chosen per step as some implementations do, is what keeps a token's key
independent of how its prompt was chunked, of prefix hits and of the other sequences:
- "dynamic" (NTK): position p uses the base for length max(p + 1, max_positions). That is what token-by-token
  decoding gives; a prompt longer than max_positions is not re-rotated as a whole.
- "longrope" (Phi-3, arXiv 2402.13753): the short factors serve an engine whose max_model_len is within the
  original length, the long ones any other.

Shape letters: L positions, R rotated dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.spec import CheckpointError, RopeSpec, yarn_magnitude


def rope_table(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin [L, R/2] in float32 for positions 0..max_model_len-1. Raises CheckpointError for an unknown
    rule, and for numbers that give no angles.
    """
    why = "angles are not finite"
    try:
        cos, sin = _table(spec, max_model_len)
        if bool(cos.isfinite().all()) and bool(sin.isfinite().all()):
            return cos, -sin if spec.backwards else sin
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        why = str(error)
    raise CheckpointError(
        f"rope scaling {spec.kind!r} gives no rotation with rope_theta = {spec.theta:g} and "
        f"{str(spec.parameters)[:200]}: {why}; correct config.json"
    )


def query_scales(spec: RopeSpec, max_model_len: int) -> Tensor | None:
    """What queries at positions 0..max_model_len-1 are multiplied by [L], or None."""
    growth = spec.query_growth
    if growth is None:
        return None
    steps = torch.floor((torch.arange(max_model_len, dtype=torch.float32) + growth.offset) / growth.length)
    return 1.0 + growth.beta * torch.log1p(steps)


def _table(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    if spec.kind == "dynamic":
        return _dynamic_table(spec, max_model_len)
    frequencies, factor = _FREQUENCIES[spec.kind](spec, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def _number(spec: RopeSpec, key: str, default: float | None = None) -> float:
    value = spec.parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"rope scaling {spec.kind!r} needs the number {key}, got {value!r}")
    if not math.isfinite(value) or (key == "factor" and value <= 0):
        raise CheckpointError(f"rope scaling {spec.kind!r} cannot have {key} = {value!r}")
    return float(value)


def _base_frequencies(spec: RopeSpec) -> Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / (spec.theta**exponents)


def _default(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _base_frequencies(spec), 1.0


def _linear(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return _base_frequencies(spec) / _number(spec, "factor"), 1.0


def _proportional(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Gemma 4: a part of a head's pairs turns, by the frequencies that it has of the whole head; the others,
    which are beside them, stay.
    """
    turning = int(_number(spec, "turning_share") * spec.rotary_dim // 2)
    still = torch.arange(spec.rotary_dim // 2) >= turning
    frequencies = _base_frequencies(spec) / _number(spec, "factor", 1.0)
    return frequencies.masked_fill(still, 0.0), 1.0


def _llama3(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (_number(spec, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(spec, "original_max_position_embeddings", spec.max_positions)
    frequencies = _base_frequencies(spec)
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled), 1.0


def _yarn(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, sharpen attention a little."""
    original = _number(spec, "original_max_position_embeddings", spec.max_positions)
    factor = _number(spec, "factor", spec.max_positions / original)
    dim = spec.rotary_dim

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = correction_dim(_number(spec, "beta_fast", 32) or 32)
    high = correction_dim(_number(spec, "beta_slow", 1) or 1)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    frequencies = _base_frequencies(spec)
    return frequencies / factor * interpolated + frequencies * (1 - interpolated), _yarn_attention_factor(
        spec, factor
    )


def _yarn_attention_factor(spec: RopeSpec, factor: float) -> float:
    if spec.parameters.get("attention_factor") is not None:
        return _number(spec, "attention_factor")
    if spec.parameters.get("mscale") and spec.parameters.get("mscale_all_dim"):
        above, below = _number(spec, "mscale"), _number(spec, "mscale_all_dim")
        return yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return yarn_magnitude(factor)


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    original = _number(spec, "original_max_position_embeddings", spec.max_positions)
    key = "long_factor" if max_model_len > original else "short_factor"
    factors = spec.parameters.get(key)
    if not isinstance(factors, list) or len(factors) != spec.rotary_dim // 2:
        raise CheckpointError(
            f"rope scaling 'longrope' needs {spec.rotary_dim // 2} numbers in {key}, got {factors!r}"
        )
    factor = _number(spec, "factor", spec.max_positions / original)
    # Phi-3.5-MoE has one for each of both.
    scale = key.replace("factor", "mscale")
    if spec.parameters.get(scale) is not None:
        attention_factor = _number(spec, scale)
    elif spec.parameters.get("attention_factor") is not None:
        attention_factor = _number(spec, "attention_factor")
    else:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    stretched = torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents
    return 1.0 / stretched, attention_factor


def _dynamic_table(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    factor, dim, limit = _number(spec, "factor"), spec.rotary_dim, spec.max_positions
    lengths = torch.arange(1, max_model_len + 1, dtype=torch.float32).clamp(min=limit)
    theta = spec.theta * (factor * lengths / limit - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] / theta[:, None] ** exponents
    return angles.cos(), angles.sin()


_FREQUENCIES: dict[str, Callable[[RopeSpec, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
