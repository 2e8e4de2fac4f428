"""Reads weights: layers ask for tensors by name and shape, and what nobody asked for is an error.

Files are memory-mapped; each tensor is converted to the target type and device once and alone, so the peak is
the model plus one tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.checkpoint import read_headers
from engine.model.spec import CheckpointError

Progress = Callable[[str, float], None]
# Buffers that old checkpoints carry and that are computed here.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


class WeightReader:
    """Hands out a checkpoint's tensors, each once. Use as a context manager; call `finish` when all are
    taken.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.progress = progress
        self.headers = read_headers(folder)
        self._left = {name for name in self.headers if not name.endswith(IGNORED_SUFFIXES)}
        self._bytes_total = sum(header.num_elements for header in self.headers.values()) or 1
        self._bytes_done = 0
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, converted. Raises CheckpointError when it is missing or of another shape."""
        header = self.headers.get(name)
        if header is None:
            near = difflib.get_close_matches(name, self._left, n=1)
            hint = f"; the checkpoint has {near[0]}" if near else ""
            raise CheckpointError(f"{self.folder}: tensor {name} of shape {list(shape)} is missing{hint}")
        if header.shape != shape:
            raise CheckpointError(
                f"{self.folder}/{header.file}: tensor {name} has shape {list(header.shape)}, "
                f"but config.json implies {list(shape)}"
            )
        self._left.discard(name)
        try:
            tensor: Tensor = self._open(header.file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder}/{header.file}: tensor {name} cannot be read: {error}"
            ) from error
        self._bytes_done += header.num_elements
        self.progress("load weights", self._bytes_done / self._bytes_total)
        if not tensor.dtype.is_floating_point:
            return tensor.to(self.device)
        return tensor.to(self.device, dtype or self.dtype)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.headers

    def discard(self, name: str) -> None:
        """Declares a tensor that is stored but not needed, such as the tied copy of the embedding."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises CheckpointError when tensors are left that no layer took."""
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(
                f"{self.folder}: {len(names)} unexpected tensors that the model does not have: {shown}"
            )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                handle = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be opened: {error}") from error
            self._files[file] = self._stack.enter_context(handle)
        return self._files[file]
