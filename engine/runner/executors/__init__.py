"""What computes steps: natively on CPUs, with torch, or queued on a device. One is chosen at start."""
