"""Files of checkpoints that stay mapped while no engine has them: what the system holds of them in memory is
found there by the next load, and what it has given up is read ahead while the engine's process starts.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

_SUFFIXES = {".safetensors", ".gguf", ".bin"}


class KeptFiles:
    """Maps of the files of every checkpoint that was wanted once."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def want(self, checkpoint: str) -> None:
        """The checkpoint is about to be read: the system fetches its files meanwhile."""
        root = Path(checkpoint)
        paths = [root] if root.is_file() else sorted(root.glob("*"))
        for path in paths:
            if path.suffix in _SUFFIXES:
                # Only a faster start is lost.
                with contextlib.suppress(OSError, ValueError):
                    self._map(path.resolve()).madvise(mmap.MADV_WILLNEED)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]

    def close(self) -> None:
        """Gives the maps back."""
        for each in self._maps.values():
            each.close()
        self._maps.clear()
