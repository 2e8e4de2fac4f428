"""Rotary position embedding. A back end is chosen once, by name."""
