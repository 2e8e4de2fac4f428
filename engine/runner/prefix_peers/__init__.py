"""Blocks of keys and values that go from the engine that computed a prompt to the one that answers."""
