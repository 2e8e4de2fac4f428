"""Smaller checkpoints, with proof: `millrace quantize`. Its page is DESIGN.md."""
