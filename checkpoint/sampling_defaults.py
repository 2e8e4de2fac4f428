"""The sampling options that a checkpoint's files recommend, and which of them says so.

A GGUF file that recommends none, with no generation_config.json beside it that does, gets llama.cpp's own:
its users know such a file by answers that were drawn so, and small quantized models wander off without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from checkpoint.files import folder_of, is_gguf, read_json

_log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# Names of generation_config.json that say how tokens are drawn.
_SAYING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PREFIX = "general.sampling."
# Keys of GGUF files below it, and the names of the same in generation_config.json.
_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys of what there is not, where they are above 0.
_UNKNOWN = ("xtc_probability", "mirostat")
# `common_params_sampling` in llama.cpp's common/common.h.
_LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Options under their names in generation_config.json, and by the same names who recommends them."""

    options: dict[str, float] = {}
    sources: dict[str, str] = {}


def read_sampling_defaults(checkpoint: Path) -> SamplingDefaults:
    """What a GGUF file's requests are drawn by, that nobody says beside it; nothing for other checkpoints,
    whose generation_config.json says all. Raises ConfigError naming the file at fault.
    """
    beside = read_json(folder_of(checkpoint) / GENERATION_CONFIG) or {}
    if not is_gguf(checkpoint) or any(beside.get(name) is not None for name in _SAYING):
        return SamplingDefaults()
    named = _named(checkpoint)
    sources = dict.fromkeys(_LLAMA_CPP, "llama.cpp, as the GGUF file recommends none")
    sources |= dict.fromkeys(named, f"{_PREFIX}* of the GGUF file")
    return SamplingDefaults(options={**_LLAMA_CPP, **named}, sources=sources)


def _named(path: Path) -> dict[str, float]:
    # The package, and numpy with it, is imported by those who have such a file.
    from checkpoint.gguf_reader import contents, open_gguf

    said = {
        name.removeprefix(_PREFIX): contents(path, field)
        for name, field in open_gguf(path).fields.items()
        if name.startswith(_PREFIX)
    }
    for key in _UNKNOWN:
        if said.get(key):
            _log.warning("%s: %s%s is not followed: there is no such option here", path, _PREFIX, key)
    # Files have single precision: 0.8 is meant, and 0.800000011920929 is there.
    found = {_KEYS[key]: float(f"{value:.6g}") for key, value in said.items() if key in _KEYS}
    if "top_k" in found:
        # llama.cpp keeps all tokens with any number below 1.
        found["top_k"] = max(0, int(found["top_k"]))
    return found
