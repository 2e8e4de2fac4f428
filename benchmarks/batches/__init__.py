"""Batches beside others, of a million lines, and under gateways and engines that are killed."""
