"""Launch shapes of the attention kernel that were measured, by what they depend on.

`tuned.json` beside this file maps an architecture ("sm_90") to {"prefill 128/4 plain": [tile, step, warps,
stages]}: the phase, the key's size, the heads of a group, how the cache is stored. `python -m
benchmarks.gpu.lease tune` measures and writes such a file; the rest has the shapes that compile_ahead checks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import cache as once
from pathlib import Path

import torch

Shape = tuple[int, int, int, int]
TABLE = Path(__file__).with_name("tuned.json")

_forced: dict[str, Shape] = {}


def key_of(*, final: bool, key_dim: int, group: int, kv: str) -> str:
    """Name of an entry; `final` is prefill, `kv` "plain", "int8", "fp8" or "kivi4"."""
    return f"{'prefill' if final else 'decode'} {key_dim}/{group} {kv}"


def tuned_shape(arch: str, key: str) -> Shape | None:
    """Largest tile, positions of a step, warps and stages for an architecture; None where nobody measured."""
    if key in _forced:
        return _forced[key]
    return _table().get(arch, {}).get(key)


@contextlib.contextmanager
def forced(key: str, shape: Shape) -> Iterator[None]:
    """Inside, `key` has this shape on every device: for measuring."""
    before = dict(_forced)
    _forced[key] = shape
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def read_table(path: Path) -> dict[str, dict[str, Shape]]:
    """A table, checked. Raises ValueError naming the entry that cannot be."""
    content: Mapping[str, Mapping[str, list[int]]] = json.loads(path.read_text(encoding="utf-8"))
    table: dict[str, dict[str, Shape]] = {}
    for arch, entries in content.items():
        for key, numbers in entries.items():
            sound = len(numbers) == 4 and all(isinstance(number, int) for number in numbers)
            powers = sound and all(number > 0 and not number & (number - 1) for number in numbers[:3])
            if not powers or numbers[0] < 16 or numbers[1] < 16 or numbers[2] > 16 or numbers[3] < 1:
                raise ValueError(f"{path}: {arch} {key!r} = {numbers}: not (tile, step, warps, stages)")
            table.setdefault(arch, {})[key] = (numbers[0], numbers[1], numbers[2], numbers[3])
    return table


@once
def arch_of(device: torch.device) -> str:
    """For example "sm_90"; "" for what is no CUDA device."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@once
def _table() -> dict[str, dict[str, Shape]]:
    return read_table(TABLE)
