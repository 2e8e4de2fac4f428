"""Loads a model for the back end that serves it: the native kernels where they can, torch otherwise.

No torch here: who serves natively may have it in another process (`loader`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.model.checkpoint import LoadRequest
from engine.model.expert_places import ExpertExchange
from engine.model.forward_batch import ForwardBatch
from engine.model.loader import Progress, load_here
from engine.model.native_decoder import NativeDecoder, why_not_lowered
from engine.model.plan import num_logit_rows
from engine.model.records import ModelRecord
from engine.model.spec import ModelSpec
from kernels.native.library import NativeLibrary, NativeUnavailableError, UnknownLevelError, load_native
from kernels.ranks.native import Ranks
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

# Products of float8 need Ada or Hopper.
FLOAT8_ARCH = (8, 9)


class Model(Protocol):
    """A Decoder or a NativeDecoder: tensors to the one are arrays to the other."""

    spec: ModelSpec
    record: ModelRecord
    max_model_len: int
    # Rows of a step are padded to a multiple of this.
    row_multiple: int

    @property
    def device(self) -> Any:
        """A torch.device or HOST."""

    def wake(self) -> None:
        """A step follows shortly."""

    def forward(self, batch: ForwardBatch, caches: Any, attention: Any) -> Any:
        """Hidden states [T, E] of the step's tokens, before the final norm; fills `caches`."""

    def logits_of(self, hidden: Any, rows: NDArray[np.int64]) -> Any:
        """Logits [R, V] of some rows of hidden [T, E], valid until the next call."""


Load = Callable[[LoadRequest, NativeLibrary, Progress], ModelRecord]


def native_library(config: EngineConfig, spec: ModelSpec, device: str) -> NativeLibrary | None:
    """The kernels that compute this model, or None when torch does; a log line says why.

    Raises ConfigError when `engine.native` requires them, or the environment a level that is not there.
    """
    reason = _why_not_native(config, spec, device)
    if not reason:
        try:
            library = load_native()
        except UnknownLevelError as error:
            raise ConfigError(str(error)) from error
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
    forced = any(name != "auto" for name in msgspec.structs.astuple(config.kernels))
    if forced or config.attention_backend not in ("auto", "native"):
        return "engine.attention_backend or engine.kernels asks for another back end"
    if config.quantize == "fp8":
        raise ConfigError(
            "engine.quantize = 'fp8': the native kernels of CPUs compute no float8; set it to int8, w8a8 or "
            "int4, or engine.native to off to have torch compute it"
        )
    return why_not_lowered(spec, block_size=config.cache.block_size)


def load_model(
    request: LoadRequest,
    *,
    device: str,
    library: NativeLibrary | None,
    progress: Progress,
    load: Load = load_here,
    ranks: Ranks | None = None,
) -> Model:
    """Reads a checkpoint, packed by `load` for `library`, or for torch. `ranks`: those that share the model,
    which the native kernels compute then. Raises CheckpointError.
    """
    config = request.config
    if library is not None:
        decoder = NativeDecoder(
            load(request, library, progress),
            library,
            num_threads=config.num_threads,
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_rows=num_logit_rows(config) if ranks is None else ranks.shape.max_rows,
            ranks=ranks,
        )
        if ranks is not None and ranks.shape.num_sparse_layers:
            decoder.expert_exchange = ExpertExchange(decoder.model.layers, ranks, library)
        return decoder
    import torch

    from engine.model.reading import load_decoder
    from kernels.selection import UnsuitableKernelsError, choose_kernels

    place = torch.device(device)
    if config.quantize == "fp8" and place.type == "cuda":
        found = torch.cuda.get_device_capability(place)
        if found < FLOAT8_ARCH:
            raise ConfigError(
                f"engine.quantize = 'fp8': {torch.cuda.get_device_name(place)} has compute capability "
                f"{found[0]}.{found[1]}, and products of float8 need {FLOAT8_ARCH[0]}.{FLOAT8_ARCH[1]}; "
                "set it to int8, w8a8 or int4"
            )
    try:
        kernels = choose_kernels(config.kernels, place)
    except UnsuitableKernelsError as error:
        raise ConfigError(str(error)) from error
    _log.info("kernels: %s", kernels)
    if request.spec.dtype == "float16" and request.dtype == "bfloat16":
        _log.info("float16 weights are rounded to bfloat16")
    return load_decoder(request, device=place, progress=progress, kernels=kernels)
