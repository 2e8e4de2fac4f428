"""JSON Schema: exact rewrites into what llguidance enforces, and a truthful report of the rest."""
