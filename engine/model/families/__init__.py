"""Model families: each turns a checkpoint's `config.json` into a ModelSpec. No torch here.

A family is one file and its name below: its functions enter themselves (`base.family`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from checkpoint.files import is_gguf
from engine.model.config_reader import ConfigReader
from engine.model.families import (  # noqa: F401
    deepseek,
    gemma,
    gpt_oss,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from engine.model.families.base import FAMILIES
from engine.model.gguf_config import gguf_reader, gguf_scheme
from engine.model.spec import CheckpointError, ModelSpec
from engine.quantization.scheme import read_scheme


def read_spec(folder: Path) -> ModelSpec:
    """The model in a checkpoint's folder. Raises CheckpointError naming an architecture that is unknown."""
    reader = gguf_reader(folder) if is_gguf(folder) else ConfigReader.of(folder)
    architectures = reader.values.get("architectures") or ["(none)"]
    if not isinstance(architectures, list):
        raise CheckpointError(f"{reader.source}: architectures = {architectures!r} is not a list")
    for name in architectures:
        if name in FAMILIES:
            scheme = gguf_scheme(folder) if is_gguf(folder) else read_scheme(reader.values, reader.source)
            return msgspec.structs.replace(FAMILIES[name](reader), architecture=name, quantization=scheme)
    raise CheckpointError(
        f"{reader.source}: architecture {', '.join(map(str, architectures))} is not supported; supported are "
        f"{', '.join(sorted(FAMILIES))}"
    )
