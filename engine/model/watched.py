"""Who sees a step's attention while it is computed: the protocols of what decoders call. (The runner measures
and votes by it, and scorers of keys are trained by it.)

Arrays where the native kernels compute, tensors where torch does. Shape letters: T tokens, E hidden size,
H query heads, K kv heads, D key dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kernels.attention.ragged import AttentionOptions


class Watcher(Protocol):
    """Who sees queries before they attend."""

    def watch(self, q: Any, cache: Any, options: AttentionOptions, keys: Any = None) -> None:
        """Queries [T, H, D] of the layer whose keys are in `cache`, the step's among them; `keys` [T, K, D]
        are these, whole, where the cache rounds them by channel.
        """


class Reader(Protocol):
    """Who sees what attention computes upon."""

    def read(self, states: Any) -> None:
        """States [T, E] that the next layer's attention computes upon."""


class StepWatcher(Watcher, Protocol):
    """Who sees every layer of a step, and what its attention computes upon where `read` is not None."""

    @property
    def read(self) -> Callable[[Any], None] | None:
        """See Reader."""
