"""The command line `millrace`."""

import os

# gRPC reads it when it is imported. What the supervisor forks replaces itself at once: gRPC's preparations
# for a child that goes on would poll descriptors there that are closed already, and may abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from services.cli.app import main

__all__ = ["main"]
