"""What converters to GGUF change in tensors, and how it is undone when they are read. No torch.

Rows that were moved are moved back in quantized tensors as well, which stay as they are packed: q and k of
architectures whose rotation pairs neighbouring rows there, heads of values of Qwen3.5's states. Norms come
with one added, decays as what their exponential gives, and vectors with other dimensions.

Shape letters: H heads, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.spec import CheckpointError

# Those whose rotation pairs neighbouring rows of q and k there, though not in their checkpoints.
_PAIRED = frozenset({"arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "smollm3"})
# Those whose norms are stored with one added, and those of them that are not.
_SHIFTED = frozenset({"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"})
_UNSHIFTED = ("ssm_norm",)
# Those whose heads of values take turns between the groups.
_TILED = frozenset({"qwen35", "qwen35moe"})


class Given(Protocol):
    """The file that a tensor is in."""

    architecture: str
    metadata: dict[str, Any]
    path: Any

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of the architecture's metadata. Raises CheckpointError."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is undone, in this order; None is nothing."""

    # Where each row lies.
    rows: NDArray[np.intp] | None = None
    # Where each column lies, of a tensor that is read as numbers.
    columns: NDArray[np.intp] | None = None
    # Of what is read.
    shape: tuple[int, ...] | None = None
    values: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    # The type that it has when it is read, where this is not the file's.
    kind: str = ""

    @property
    def is_of_whole(self) -> bool:
        """Whether a part of it is known only when all of it is undone."""
        return self.columns is not None or self.shape is not None

    def undone(self, values: NDArray[Any]) -> NDArray[Any]:
        """A tensor's numbers, whose rows are in order, as its checkpoint had them."""
        if self.columns is not None:
            values = values[:, self.columns]
        if self.shape is not None:
            values = values.reshape(self.shape)
        return values if self.values is None else self.values(values)

    def in_order(self, rows: NDArray[Any], part: slice = slice(None)) -> NDArray[Any]:
        """Rows of numbers, or of packed bytes, in the checkpoint's order, or a part of them."""
        return rows[part] if self.rows is None else rows[self.rows[part]]


UNCHANGED = Change()


def change_of(file: Given, tensor: Any, name: str) -> Change:
    """What is undone in a tensor that its layer calls `name`. Raises CheckpointError."""
    stem, _, suffix = name.rpartition(".")
    arch, shape = file.architecture, tuple(int(size) for size in reversed(tensor.shape))
    if arch in _PAIRED and stem in ("attn_q", "attn_k"):
        return _paired(file, tensor.name, stem, shape[0])
    if arch in _SHIFTED and stem.endswith("norm") and suffix == "weight" and stem not in _UNSHIFTED:
        return Change(values=_less_one)
    if stem.startswith(("ssm_conv1d", "shortconv.conv")) and suffix == "weight":
        rows = _tiled_channels(file, shape[0]) if arch in _TILED else None
        return Change(rows=rows, shape=(int(np.prod(shape[:-1])), 1, shape[-1]))
    if name in ("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_dt.bias"):
        size = int(np.prod(shape))
        rows = _tiled(file, size, 1) if arch in _TILED and name in ("ssm_a", "ssm_dt.bias") else None
        # Mamba has decays by channel and key.
        kept = shape if arch in ("jamba", "mamba") else (size,)
        return Change(rows=rows, shape=kept, values=_log if name == "ssm_a" else None)
    if arch in _TILED:
        return _tiled_change(file, stem, shape)
    return UNCHANGED


def split_of(file: Given, tensor: Any, name: str) -> list[tuple[str, Change]]:
    """Names, in their layer, of tensors that are one in the file, and how each is read; none for others."""
    if name != "ssm_ba.weight":
        return []
    # Of each group gains, then decays.
    heads, groups = file.number("ssm.time_step_rank"), file.number("ssm.group_count")
    rows = int(tensor.shape[1])
    if not groups or heads % groups or rows != 2 * heads:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.ssm.time_step_rank = {heads} and ssm.group_count = {groups} "
            f"do not divide the {rows} rows of {tensor.name}"
        )
    found = np.arange(rows).reshape(groups, 2, heads // groups)
    size = (heads, int(tensor.shape[0]))
    parts = (("state.in_proj_b.weight", 0), ("state.in_proj_a.weight", 1))
    return [(part, Change(rows=found[:, index].ravel(), shape=size)) for part, index in parts]


def joined(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """One weight [H * (N + V), R] of what latents [R] become: keys [H, R, N] and values [H, V, R]."""
    rows = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
    return np.ascontiguousarray(rows.reshape(-1, rows.shape[2]), dtype=np.float32)


def _paired(file: Given, tensor: str, stem: str, num_rows: int) -> Change:
    """Rows of each head from (0, half, 1, half + 1, ...) back to 0, 1, 2, ..."""
    count = "head_count" if stem == "attn_q" else "head_count_kv"
    prefix = f"{file.architecture}.attention"
    given = file.metadata.get(f"{prefix}.{count}", file.metadata.get(f"{prefix}.head_count"))
    if isinstance(given, list) and len(set(given) - {0}) == 1:
        # Layers that do not attend have none.
        given = max(given)
    if not isinstance(given, int):
        # What is absent, or differs between layers, is refused by its name with the configuration.
        return UNCHANGED
    if given < 1 or num_rows % (2 * given):
        raise CheckpointError(
            f"{file.path}: {prefix}.{count} = {given} does not divide the {num_rows} rows of {tensor} into "
            "heads"
        )
    return Change(rows=np.arange(num_rows).reshape(given, -1, 2).swapaxes(1, 2).ravel())


def _tiled_change(file: Given, stem: str, shape: tuple[int, ...]) -> Change:
    if stem == "attn_qkv":
        return Change(rows=_tiled_channels(file, shape[0]))
    if stem in ("attn_gate", "ssm_alpha", "ssm_beta"):
        return Change(rows=_tiled(file, shape[0], shape[0] // file.number("ssm.time_step_rank")))
    if stem == "ssm_out":
        # Of packed blocks no columns can be moved.
        size = shape[1] // file.number("ssm.time_step_rank")
        return Change(columns=_tiled(file, shape[1], size), kind="F32")
    return UNCHANGED


def _tiled_channels(file: Given, channels: int) -> NDArray[np.intp]:
    """Where channels lie: those of queries and keys in place, of values by heads."""
    keys = 2 * file.number("ssm.group_count") * file.number("ssm.state_size")
    values = _tiled(file, channels - keys, (channels - keys) // file.number("ssm.time_step_rank"))
    return np.concatenate((np.arange(keys), keys + values))


def _tiled(file: Given, count: int, size: int) -> NDArray[np.intp]:
    """Where elements of heads of values lie, `size` for each: the first heads of all groups come first, then
    all second ones. Raises CheckpointError.
    """
    heads, groups = file.number("ssm.time_step_rank"), file.number("ssm.group_count")
    if not groups or heads % groups or heads * size != count:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.ssm.time_step_rank = {heads} and ssm.group_count = {groups} "
            f"do not divide {count} elements into heads"
        )
    return np.arange(count).reshape(heads // groups, groups, size).swapaxes(0, 1).ravel()


def _less_one(values: NDArray[Any]) -> NDArray[Any]:
    return values - np.float32(1)


def _log(values: NDArray[Any]) -> NDArray[Any]:
    """Logarithms of decays, which are stored as what they are."""
    logarithms: NDArray[Any] = np.log(-values)
    return logarithms
