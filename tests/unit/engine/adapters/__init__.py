"""Low-rank adapters in the engine."""
