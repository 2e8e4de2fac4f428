"""What the native kernels take from the environment.

These are not keys of the configuration file: they say where machine code lies and which code runs, and hold
for tests, benchmarks and every process of a machine alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Folder of the built libraries.
CACHE_VARIABLE = "NATIVE_KERNELS_CACHE"
# Forces a level below the machine's best, for tests and comparisons.
LEVEL_VARIABLE = "NATIVE_KERNELS_LEVEL"


def cache_folder() -> Path:
    """Where libraries are kept: as named, or below the user's own cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "millrace" / "native"


def forced_level() -> str:
    """The level that must be used; empty leaves the choice to the machine."""
    return os.environ.get(LEVEL_VARIABLE, "")


def named_compiler() -> str:
    """The compiler that the environment names; may be empty."""
    return (os.environ.get("CXX", "").split() or [""])[0]


def child_environment() -> Mapping[str, str]:
    """Environment of a child process that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
