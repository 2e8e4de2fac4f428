"""Sparse feed-forward layers on the native kernels; `engine.model.experts` is the same in torch."""
