"""What Triton and torch take from the environment, and nowhere else."""

from __future__ import annotations

import os


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
