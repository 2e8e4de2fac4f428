"""Penalties, masks, filters and the draw, over rows of logits. A back end is chosen once, by name.

Both are driven by engine/sampling, which knows the tables: "torch" is the reference there.
"""

BACKENDS = {
    "torch": "engine.sampling.sampler:sample_by_torch",
    "triton": "engine.kernels.sampling.triton_sampling:sample",
}

__all__ = ["BACKENDS"]
