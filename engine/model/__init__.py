"""Models: what a checkpoint is, how it is read, how it computes. This package root stays free of torch."""
