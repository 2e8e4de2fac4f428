"""Which back end computes each operation of a model: chosen once, at start, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from kernels import sampling
from kernels.activation import backends as gates
from kernels.config import KernelsConfig, triton_interprets
from kernels.linear import backends as products
from kernels.norm import backends as norms
from kernels.recurrent import backends as recurrences
from kernels.rope import backends as rotations

OPERATIONS: Mapping[str, Mapping[str, str]] = {
    "norm": norms.BACKENDS,
    "rope": rotations.BACKENDS,
    "activation": gates.BACKENDS,
    "linear": products.BACKENDS,
    "recurrent": recurrences.BACKENDS,
    "sampling": sampling.BACKENDS,
}
"""Operation, as `[engine.kernels]` names it, to its back ends: "module:name" by name, imported at need."""


class UnsuitableKernelsError(Exception):
    """A name that is unknown, or that cannot serve here; the message names the key and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a model computes with."""

    names: Mapping[str, str]
    norm: norms.NormBackend
    rope: rotations.RopeBackend
    gate: gates.Gate
    linear: products.LinearBackend
    recurrent: recurrences.RecurrentBackend

    def __str__(self) -> str:
        return ", ".join(f"{operation} {name}" for operation, name in self.names.items())


def choose_kernels(config: KernelsConfig, device: torch.device) -> Kernels:
    """The back ends that `config` names; raises UnsuitableKernelsError."""
    usual = "triton" if device.type == "cuda" and find_spec("triton") else "torch"
    asked: dict[str, str] = msgspec.structs.asdict(config)
    names = {operation: usual if name == "auto" else name for operation, name in asked.items()}
    for operation, name in names.items():
        if name not in OPERATIONS[operation]:
            known = ", ".join(sorted(OPERATIONS[operation]))
            raise UnsuitableKernelsError(
                f"engine.kernels.{operation} = {name!r}: must be auto or one of {known}"
            )
        if name in ("triton", "invariant") and not _triton_runs(device):
            raise UnsuitableKernelsError(
                f"engine.kernels.{operation} = {name!r}: it needs a CUDA device and the package triton; "
                "set it to auto or torch"
            )
    return Kernels(
        names=names,
        norm=_load("norm", names)(),
        rope=_load("rope", names),
        gate=_load("activation", names),
        linear=_load("linear", names)(),
        recurrent=_load("recurrent", names)(),
    )


def torch_kernels() -> Kernels:
    """Torch for everything: the reference."""
    config = dict.fromkeys(OPERATIONS, "torch")
    return choose_kernels(KernelsConfig(**config), torch.device("cpu"))


def _load(operation: str, names: Mapping[str, str]) -> Any:
    module, _, name = OPERATIONS[operation][names[operation]].partition(":")
    return getattr(importlib.import_module(module), name)


def _triton_runs(device: torch.device) -> bool:
    # Its interpreter runs on any device.
    return find_spec("triton") is not None and (device.type == "cuda" or triton_interprets())
