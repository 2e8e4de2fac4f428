"""Sampling options: from a message, and as the fields of one."""

from __future__ import annotations

from typing import Any

from millrace.common.v1 import sampling_pb2

from contract.sampling import OPTIONS, SCALARS, SamplingOptions, SamplingParams, scalars_of

_FLOATS = tuple(name for name in SCALARS if OPTIONS[name].kind is float)


def options(message: sampling_pb2.SamplingOptions) -> SamplingOptions:
    """What a client set; the rest is None."""
    return SamplingOptions(**given(message), stop=tuple(message.stop))


def given(message: sampling_pb2.SamplingOptions) -> dict[str, Any]:
    """The numbers that the message sets and all lists but the stop strings, by name, in Python's types."""
    has: Any = message.HasField
    found: dict[str, Any] = {name: getattr(message, name) for name in SCALARS if has(name)}
    for name in _FLOATS:
        if name in found:
            found[name] = _exact(found[name])
    found["logit_bias"] = dict(message.logit_bias)
    found["allowed_token_ids"] = tuple(message.allowed_token_ids)
    found["stop_token_ids"] = tuple(message.stop_token_ids)
    return found


def _exact(value: float) -> float:
    # Floats of the wire have 32 bits: 0.1 arrives as 0.10000000149, which nobody meant.
    return value if value.is_integer() else float(f"{value:.7g}")


def fields(params: SamplingParams) -> dict[str, Any]:
    """Every option set, so that no default of the receiver's matters."""
    found: dict[str, Any] = dict(zip(SCALARS, scalars_of(params), strict=True))
    found["logit_bias"] = params.logit_bias
    found["allowed_token_ids"] = params.allowed_token_ids
    found["stop_token_ids"] = params.stop_token_ids
    return found
