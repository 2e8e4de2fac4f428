"""Sampling options: from a message, and as the fields of one."""

from __future__ import annotations

from typing import Any

from millrace.common.v1 import sampling_pb2

from contract.sampling import OPTIONS, SCALARS, SamplingOptions, SamplingParams, scalars_of


def options(message: sampling_pb2.SamplingOptions) -> SamplingOptions:
    """What a client set; the rest is None."""
    return SamplingOptions(**given(message), stop=tuple(message.stop))


def given(message: sampling_pb2.SamplingOptions) -> dict[str, Any]:
    """The options that the message sets, stop strings left out, by name and as Python's own types."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        option = OPTIONS.get(field.name)
        if option is not None:
            # Floats of the wire have 32 bits: 0.1 arrives as 0.10000000149, which nobody meant.
            found[field.name] = float(f"{value:.7g}") if option.kind is float else option.kind(value)
    return found


def fields(params: SamplingParams) -> dict[str, Any]:
    """Every option set, so that no default of the receiver's matters."""
    found: dict[str, Any] = dict(zip(SCALARS, scalars_of(params), strict=True))
    found["logit_bias"] = params.logit_bias
    found["allowed_token_ids"] = params.allowed_token_ids
    found["stop_token_ids"] = params.stop_token_ids
    return found
