"""Model families: each turns a checkpoint's `config.json` into a ModelSpec. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.model.checkpoint import is_gguf
from engine.model.config_reader import ConfigReader
from engine.model.families import (
    deepseek,
    gemma,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from engine.model.gguf_config import gguf_reader, gguf_scheme
from engine.model.spec import CheckpointError, ModelSpec
from engine.quantization.scheme import read_scheme

FAMILIES: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "Gemma2ForCausalLM": gemma.read_gemma2,
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "GptOssForCausalLM": gpt_oss.read,
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "MixtralForCausalLM": mixtral.read,
    "Olmo2ForCausalLM": olmo2.read,
    "Phi3ForCausalLM": phi3.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
}
"""Name in `architectures` of config.json to the family that reads it."""


def read_spec(folder: Path) -> ModelSpec:
    """The model in a checkpoint's folder. Raises CheckpointError naming an architecture that is unknown."""
    reader = gguf_reader(folder) if is_gguf(folder) else ConfigReader.of(folder)
    architectures = reader.values.get("architectures") or ["(none)"]
    if not isinstance(architectures, list):
        raise CheckpointError(f"{reader.source}: architectures = {architectures!r} is not a list")
    for name in architectures:
        if name in FAMILIES:
            scheme = gguf_scheme(folder) if is_gguf(folder) else read_scheme(reader.values, reader.source)
            return msgspec.structs.replace(FAMILIES[name](reader), quantization=scheme)
    raise CheckpointError(
        f"{reader.source}: architecture {', '.join(map(str, architectures))} is not supported; supported are "
        f"{', '.join(sorted(FAMILIES))}"
    )
