"""Penalties, masks, filters and the draw, over rows of logits. A back end is chosen once, by name.

engine/sampling drives them, as it knows the tables.
"""

BACKENDS = {
    "torch": "engine.sampling.by_torch:sample_by_torch",
    "triton": "engine.sampling.on_device:sample_on_device",
}

__all__ = ["BACKENDS"]
