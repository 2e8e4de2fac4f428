"""Kernels one by one, beside the peers and the machine's limits."""
