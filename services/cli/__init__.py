"""The command line `millrace`."""

from services.cli.app import main

__all__ = ["main"]
