"""What parts of a native program that have files of their own ask of the program's builder.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from engine.model.records import Attention, FeedForward, Floats, Linear, Norm, SparseFeedForward
from kernels.host import Values
from kernels.native.library import NativeLibrary, Op
from kernels.paged_cache.native import Storage


class OpsBuilder(Protocol):
    """ProgramBuilder, as they see it."""

    library: NativeLibrary
    # Address of the step's description.
    step: int
    ops: list[Op]
    stream: Floats  # [T, E]
    # What layers read of a second embedding.
    parts: Values | None

    def buffer(self, name: str, width: int) -> Floats:
        """[T, width], the same for all layers that ask for that width."""

    def add(self, name: str, args: ctypes.Structure, *keep: object) -> None:
        """Appends an op; `keep` is what its args point to."""

    def enter(self, norm: Norm | None) -> Floats:
        """The stream, normed, once what is pending has joined it."""

    def norm(self, norm: Norm | None, name: str) -> Floats:
        """The norm of the stream in the buffer `name`."""

    def product(self, linear: Linear, x: Floats, out: Floats, join: bool) -> None:
        """out (+)= x W^T + b."""

    def attention(self, attention: Attention, cache: Storage, x: Floats, out: Floats, join: bool) -> None:
        """A layer's attention."""

    def feed_forward(self, feed_forward: FeedForward, x: Floats, out: Floats, join: bool) -> None:
        """A dense feed-forward."""

    def sparse_feed_forward(
        self,
        feed_forward: SparseFeedForward,
        x: Floats,
        out: Floats,
        join: bool,
        asked: Floats | None = None,
    ) -> None:
        """A router and its experts; the router takes x, or what it is `asked`."""
