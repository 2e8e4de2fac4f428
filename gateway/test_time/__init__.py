"""Thinking longer as a service: samples of one answer, of which one is chosen."""
