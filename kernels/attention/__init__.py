"""Attention over a paged cache. A back end is chosen once, by name."""
