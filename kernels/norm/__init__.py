"""Root-mean-square norm. A back end is chosen once, by name."""
