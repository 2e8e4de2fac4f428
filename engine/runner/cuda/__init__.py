"""Steps on a GPU: launched without waiting, decode replayed from captured graphs. See DESIGN.md."""
