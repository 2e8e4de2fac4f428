"""Training of scorers, by which answers choose what they keep of their prompts (`kv.policy` kvzap)."""
