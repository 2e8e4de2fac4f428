"""Blocks of keys and values on disk: found again after a restart, and by other engines of the machine."""
