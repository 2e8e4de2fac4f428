"""Penalties, masks, filters and the draw, over rows of logits."""
