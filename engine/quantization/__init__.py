"""Quantized weights: reading those that checkpoints hold, and making them from dense ones at load."""
