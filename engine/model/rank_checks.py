"""Whether ranks can share a checkpoint here, which `plan_input` asks before anything is planned. No torch."""

from __future__ import annotations

from pathlib import Path

from checkpoint.files import is_gguf
from engine.config import EngineConfig, num_threads
from engine.model.shards import why_not_shared
from engine.model.spec import ModelSpec, TensorHeader
from engine.model.weight_memory import HEAD
from engine.quantization.scheme import FLOAT_TYPES
from runtime.errors import ConfigError


def check_ranks(
    spec: ModelSpec, config: EngineConfig, folder: Path, device: str, headers: dict[str, TensorHeader]
) -> None:
    """Raises ConfigError where a model cannot be shared among ranks, or not here."""
    asked, degrees = config.parallel.asked, config.parallel.degrees
    if device != "cpu":
        raise ConfigError(
            f"{asked}: ranks of this make compute on CPUs, and engine.device is {device}; set it to cpu, or "
            "engine.make to vllm with engine.vllm.tensor_parallel_size"
        )
    if is_gguf(folder):
        raise ConfigError(
            f"{asked}: {folder} is a GGUF file, of which ranks cannot read parts; give a checkpoint of "
            "safetensors, or set it to 1"
        )
    refused = why_not_shared(spec, degrees)
    if refused is not None:
        asked = f"engine.parallel.{refused.degree} = {getattr(degrees, refused.degree)}"
        raise ConfigError(f"{asked}: {refused.reason}")
    parts = {name: header.dtype for name, header in headers.items() if name.startswith("lm_head.")}
    if not parts.keys() <= {HEAD, "lm_head.bias"} or not set(parts.values()) <= FLOAT_TYPES:
        raise ConfigError(
            f"{asked}: the head of {folder} is quantized, of which ranks cannot read parts; set it to 1, or "
            "give a checkpoint with a dense head"
        )
    threads = config.num_threads or num_threads()
    if threads < degrees.size:
        raise ConfigError(
            f"{asked}: a rank computes on one core at least, and there are {threads}; lower it, or set "
            "engine.num_threads if ranks are to share cores"
        )
