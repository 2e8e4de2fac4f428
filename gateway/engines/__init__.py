"""Engines as the gateway sees them: one long-lived stream each, their load, routing, and continuation."""
