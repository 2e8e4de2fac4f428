"""Which schemes go with which methods, and why others do not: known before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from runtime.errors import ConfigError

SchemeName = Literal["int8", "w8a8", "fp8", "int4", "nf4", "mxfp4"]
MethodName = Literal["rtn", "awq", "gptq", "smoothquant"]
SCHEMES: tuple[SchemeName, ...] = get_args(SchemeName)
METHODS: tuple[MethodName, ...] = get_args(MethodName)

# Methods that look at what the model does with texts.
CALIBRATED: frozenset[MethodName] = frozenset({"awq", "gptq", "smoothquant"})
_ALLOWED: Mapping[MethodName, tuple[SchemeName, ...]] = {
    "rtn": SCHEMES,
    "awq": ("int4", "int8"),
    "gptq": ("int4", "int8", "w8a8"),
    "smoothquant": ("w8a8",),
}
_BECAUSE: Mapping[MethodName, str] = {
    "awq": "it scales weights that are rounded to integers while inputs stay in floating point",
    "gptq": "it makes up for the error of integers; floats of 8 bits leave it little, and codes with scales "
    "of their own (nf4, mxfp4) are not what it rounds to",
    "smoothquant": "it moves the range of inputs into weights, which helps only where inputs are rounded to "
    "integers, too",
}

_CHANNEL: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_PER_TOKEN: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def check_choice(scheme: SchemeName, method: MethodName, calibration: str) -> None:
    """Raises ConfigError for a combination that makes no sense, and says which ones do."""
    if scheme not in _ALLOWED[method]:
        others = [each for each in METHODS if scheme in _ALLOWED[each]]
        raise ConfigError(
            f"--method {method} with --scheme {scheme}: {_BECAUSE[method]}; {method} is for "
            f"{', '.join(_ALLOWED[method])}, and {scheme} is made by {', '.join(others)}"
        )
    if method in CALIBRATED and not calibration:
        raise ConfigError(
            f"--method {method} looks at what the model does with texts: give --calibration FILE (JSONL with "
            "text or messages, or plain text) like what it will serve, or --calibration bundled for "
            "generated ones"
        )


def config_group(scheme: SchemeName, method: MethodName, group_size: int) -> dict[str, Any] | str:
    """What llm-compressor is told of linear layers: a group of its configuration, or a preset's name."""
    match scheme:
        case "int8":
            return {"targets": ["Linear"], "weights": dict(_CHANNEL)}
        case "w8a8":
            return {
                "targets": ["Linear"],
                "weights": dict(_CHANNEL),
                "input_activations": dict(_PER_TOKEN),
            }
        case "int4":
            weights = {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": group_size,
                # Scaled channels are no longer even around zero.
                "symmetric": method != "awq",
            }
            return {"targets": ["Linear"], "weights": weights}
        case "fp8":
            return "FP8_DYNAMIC"
        case "mxfp4":
            return "MXFP4A16"
        case "nf4":
            return ""
