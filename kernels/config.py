"""Which back end computes each operation, and what Triton and torch take from the environment."""

from __future__ import annotations

import os

import msgspec


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.kernels]`: back end of each operation by name ("torch", "triton"). "auto" is Triton on a GPU
    that has it, torch elsewhere. (Attention has its own key; on CPUs engine.native replaces them all.)
    linear = "invariant" gives every request the bits that it has alone, on a GPU, at the price of speed.
    """

    norm: str = "auto"
    rope: str = "auto"
    activation: str = "auto"
    linear: str = "auto"
    recurrent: str = "auto"
    sampling: str = "auto"


def triton_interprets() -> bool:
    """Whether Triton's kernels run in its interpreter, on any device; it asks when they are defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def prefer_expandable_segments() -> None:
    """Lets segments of torch's CUDA allocator grow, unless the environment says how it allocates.

    Steps differ in size: segments that grow keep what they leave from falling into pieces. torch reads this
    when it first allocates.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
