"""What engines measured in their first steps on this machine, kept by model and quantization: so that `up`
can say which quantization is faster here, and `doctor` what to expect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

import msgspec

from runtime.resources import cpuinfo, num_cores

FILE_NAME = "speeds.json"
# The scheme suggested where nothing has been measured: it loses the least accuracy of those that CPUs have
# kernels for.
_FIRST = "w8a8"
_NONE = "off"
_CPU_KERNELS = ("avx", "amx", "neon")


class KeptSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of an engine's first steps."""

    processor: str
    model: str
    quantize: str
    kernels: str
    alone: float
    together: float
    streams: int
    prompt: float
    # ISO 8601.
    day: str

    @property
    def _is_of(self) -> tuple[str, str, str]:
        return self.processor, self.model, self.quantize

    def __str__(self) -> str:
        if not self.alone:
            # It reads, and generates nothing.
            return f"{self.prompt:.0f} tokens/s of what it reads"
        return (
            f"{self.alone:.0f} tokens/s alone, {self.together:.0f} for {self.streams} at once, "
            f"{self.prompt:.0f} of prompts"
        )


def processor_name() -> str:
    """The processor as its maker names it, with what of it may be used."""
    names = cpuinfo("model name", "CPU part")
    return f"{names[0] if names else 'unknown processor'}, {num_cores()} cores"


def of_engines(models: Mapping[str, str], said: Mapping[str, Mapping[str, str]]) -> list[KeptSpeed]:
    """What the engines of a stack said when they were ready; nothing of those that have not measured.
    `models` are the names of theirs, by those of their processes.
    """
    return [
        KeptSpeed(
            processor=processor_name(),
            model=models[name],
            quantize=each["quantize"],
            kernels=each["kernels"],
            alone=float(each["alone"]),
            together=float(each["together"]),
            streams=int(each["streams"]),
            prompt=float(each["prompt"]),
            day=date.today().isoformat(),
        )
        for name, each in said.items()
        if name in models and "kernels" in each
    ]


def read(directory: Path) -> list[KeptSpeed]:
    """What is kept there; nothing where the file is not there or not whole."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=list[KeptSpeed])
    except (OSError, msgspec.DecodeError):
        return []


def keep(directory: Path, measured: Iterable[KeptSpeed]) -> None:
    """Keeps the latest of each processor, model and quantization. A full disk is no failure."""
    kept = {each._is_of: each for each in [*read(directory), *measured]}
    path = directory / FILE_NAME
    with contextlib.suppress(OSError):
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(list(kept.values())))
        os.replace(part, path)


def advice(measured: list[KeptSpeed], kept: list[KeptSpeed]) -> str:
    """Which quantization is faster than what runs, or may be; empty where none is known."""
    runs = next((each for each in measured if each.alone), None)
    if runs is None or not runs.kernels.startswith(_CPU_KERNELS):
        return ""
    here = [each for each in kept if (each.processor, each.model) == (runs.processor, runs.model)]
    best = max(here, key=lambda each: each.alone, default=runs)
    if best.alone > runs.alone and best.quantize != runs.quantize:
        return f"--quantize {best.quantize} reached {best} here on {best.day}"
    if runs.quantize == _NONE and all(each.quantize != _FIRST for each in here):
        return f"--quantize {_FIRST} may be: a token reads half the bytes (not measured here yet)"
    return ""
