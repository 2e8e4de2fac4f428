"""Whether ranks can share a checkpoint here, which `plan_input` asks before anything is planned. No torch."""

from __future__ import annotations

from pathlib import Path

from checkpoint.files import is_gguf
from engine.config import EngineConfig, num_threads
from engine.model.gguf_file import open_gguf
from engine.model.shards import Shard, degrees_of, why_not_shared
from engine.model.spec import ModelSpec, TensorHeader
from engine.model.weight_memory import HEAD
from engine.quantization.scheme import FLOAT_TYPES
from kernels.ranks.shares import Degrees
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
    refused = why_not_shared(spec, degrees)
    if refused is not None:
        asked = f"engine.parallel.{refused.degree} = {getattr(degrees, refused.degree)}"
        raise ConfigError(f"{asked}: {refused.reason}")
    if is_gguf(folder):
        _check_blocks(spec, config, folder)
    else:
        _check_head(asked, folder, headers)
    threads = config.num_threads or num_threads()
    if threads < degrees.size:
        raise ConfigError(
            f"{asked}: a rank computes on one core at least, and there are {threads}; lower it, or set "
            "engine.num_threads if ranks are to share cores"
        )


def _check_head(asked: str, folder: Path, headers: dict[str, TensorHeader]) -> None:
    """A head is cut where its rows have numbers alone."""
    parts = {name: header.dtype for name, header in headers.items() if name.startswith("lm_head.")}
    if not parts.keys() <= {HEAD, "lm_head.bias"} or not set(parts.values()) <= FLOAT_TYPES:
        raise ConfigError(
            f"{asked}: the head of {folder} is quantized, of which ranks cannot read parts; set it to 1, or "
            "give a checkpoint with a dense head"
        )


def _check_blocks(spec: ModelSpec, config: EngineConfig, path: Path) -> None:
    """What is cut by inputs is cut between blocks, whose inputs share scales."""
    file, degrees = open_gguf(path), config.parallel.degrees
    if name := _torn(spec, path, degrees):
        header, block = file.headers[name], file.block_of(name)
        fit = ", ".join(map(str, degrees_of_file(spec, path, "tensor", degrees.tensor)))
        raise ConfigError(
            f"engine.parallel.tensor = {degrees.tensor}: {name} of {path} has {header.shape[1]} inputs in "
            f"{header.dtype}, whose blocks of {block} are not parted; set it to one of {fit}, or share the "
            "layers by engine.parallel.pipeline"
        )


def _torn(spec: ModelSpec, path: Path, degrees: Degrees) -> str:
    """The first tensor of a GGUF file whose blocks would be parted; empty where none is."""
    file = open_gguf(path)
    # All ranks' parts are of one size.
    shard = Shard.of(spec, 0, degrees)
    for name, header in file.headers.items():
        part = shard.part_of(name, header.shape)
        if part is not None and part.axis and part.size % file.block_of(name):
            return name
    return ""


def degrees_of_file(spec: ModelSpec, path: Path, name: str, most: int) -> list[int]:
    """As `degrees_of`, for a checkpoint whose blocks may be in the way."""
    found = degrees_of(spec, name, most)
    if not is_gguf(path):
        return found
    return [size for size in found if not _torn(spec, path, Degrees(**{name: size}))]
