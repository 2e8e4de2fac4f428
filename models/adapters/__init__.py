"""Low-rank adapters of the bundled model: how they are trained, and what they change."""
