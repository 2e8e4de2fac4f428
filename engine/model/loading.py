"""Loads a model for the back end that serves it: the native kernels where they can, torch otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.kernels.linear.native import NativePacker
from engine.kernels.native import NativeLibrary, NativeUnavailableError, load_native
from engine.kernels.selection import UnsuitableKernelsError, choose_kernels
from engine.model.decoder import Decoder, load_decoder
from engine.model.lowering import NativeDecoder, NativePacking, why_not_lowered
from engine.model.spec import ModelSpec
from services.errors import ConfigError

_log = logging.getLogger(__name__)

Model = Decoder | NativeDecoder


def native_library(config: EngineConfig, spec: ModelSpec, device: str) -> NativeLibrary | None:
    """The kernels that compute this model, or None when torch does; a log line says why.

    Raises ConfigError when `engine.native` requires them.
    """
    reason = _why_not_native(config, spec, device)
    if not reason:
        try:
            library = load_native()
        except NativeUnavailableError as error:
            reason = str(error)
        else:
            _log.info("native kernels: %s, %s", library.level, library.path)
            return library
    if config.native == "required":
        raise ConfigError(f"engine.native = 'required', but {reason}; set it to auto to serve with torch")
    if config.native == "auto" and device == "cpu":
        _log.warning("no native kernels, torch serves %s: %s", spec.architecture, reason)
    return None


def _why_not_native(config: EngineConfig, spec: ModelSpec, device: str) -> str:
    if config.native == "off" or device != "cpu":
        return f"engine.native is {config.native} and engine.device is {device}"
    if config.cache.kv_dtype == "fp8":
        return "engine.cache.kv_dtype = 'fp8' is read by torch alone"
    if config.quantize == "fp8":
        return "engine.quantize = 'fp8' is computed by torch alone"
    forced = any(name != "auto" for name in msgspec.structs.astuple(config.kernels))
    if forced or config.attention_backend not in ("auto", "native"):
        return "engine.attention_backend or engine.kernels asks for another back end"
    return why_not_lowered(spec, block_size=config.cache.block_size)


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[str, float], None],
    config: EngineConfig,
    library: NativeLibrary | None,
) -> Model:
    """Reads a checkpoint, packed for `library` or for torch. Raises CheckpointError as load_decoder does."""
    packing = None
    try:
        kernels = choose_kernels(config.kernels, device)
    except UnsuitableKernelsError as error:
        raise ConfigError(str(error)) from error
    if library is None:
        _log.info("kernels: %s", kernels)
    else:
        packing = NativePacking(NativePacker(library, num_threads=config.num_threads))
    if spec.dtype == "float16" and dtype == torch.bfloat16:
        kept = packing is not None and packing.keeps_float16
        _log.info("float16 weights are %s", "kept" if kept else "rounded to bfloat16")
    decoder = load_decoder(
        folder,
        spec,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        progress=progress,
        config=config,
        packing=packing,
        kernels=kernels,
    )
    if library is None:
        return decoder
    return NativeDecoder(
        decoder,
        library,
        num_threads=config.num_threads,
        max_tokens=config.scheduler.max_num_batched_tokens,
    )
