"""Alternating updates: several streams of which each layer computes one (Gemma 3n)."""
