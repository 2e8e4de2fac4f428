"""Layers that carry a state from token to token: short convolutions, and matrices that decay and learn."""
