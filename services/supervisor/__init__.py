"""Runs a whole deployment on one machine: starts, watches, restarts and drains every process of it."""
