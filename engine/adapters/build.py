"""The slots of a loaded model, for whoever multiplies, with the adapters that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from engine.adapters.store import AdapterStore, Changes, with_slots
from engine.adapters.version import AdapterError
from engine.config import AdaptersConfig
from engine.model.back_end import Model
from engine.model.native_decoder import NativeDecoder
from engine.model.records import Linear
from kernels.adapters.native import NativeChanges

if TYPE_CHECKING:
    from engine.model.decoder import Decoder


def make_store(
    model: Model, config: AdaptersConfig, *, dtype: str, make: Callable[..., AdapterStore] = AdapterStore
) -> AdapterStore:
    """Of a model that is served in `dtype`; `make` it of linear layers and `max_rank`. Raises AdapterError
    for an adapter that cannot be served.
    """
    num_slots = config.num_slots
    if not num_slots:
        return AdapterStore.of_none()
    if isinstance(model, NativeDecoder):
        linears = native_slots(model, config, dtype=dtype)
    else:
        linears = _with_slots_of_torch(cast("Decoder", model), config, num_slots, dtype)
    store = make(linears, max_rank=config.max_rank)
    for name, folder in config.paths.items():
        try:
            store.add(name, folder)
        except AdapterError as error:
            raise AdapterError(f"engine.adapters.paths: {error}") from error
    return store


def native_slots(model: NativeDecoder, config: AdaptersConfig, *, dtype: str) -> list[Linear]:
    """The linear layers of a native program that take adapters, with slots; none where there are none."""
    make = partial(
        NativeChanges, num_slots=config.num_slots, max_rank=config.max_rank, bfloat16=dtype == "bfloat16"
    )
    return with_slots(model.model, make) if config.num_slots else []


def _with_slots_of_torch(model: Decoder, config: AdaptersConfig, num_slots: int, dtype: str) -> list[Linear]:
    import torch

    from kernels.adapters.reference import TorchChanges

    def make(inputs: int, sizes: Sequence[int]) -> Changes:
        return TorchChanges(
            inputs,
            sizes,
            num_slots=num_slots,
            max_rank=config.max_rank,
            dtype=getattr(torch, dtype),
            device=model.device,
        )

    model.num_adapter_slots = num_slots
    return with_slots(model.record, make)
