"""Activations of feed-forward layers. A back end is chosen once, by name."""
