"""Storage of keys and values in blocks."""
