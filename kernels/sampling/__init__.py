"""Penalties, masks, filters and the draw, over rows of logits. A back end is chosen once, by name.

The tables that they read by slot are engine/sampling's, which knows the requests.
"""

BACKENDS = {
    "torch": "kernels.sampling.reference:sample_by_torch",
    "triton": "kernels.sampling.on_device:sample_on_device",
}

__all__ = ["BACKENDS"]
