"""Kernels in C++ for CPUs, built on first use. See DESIGN.md."""
