"""Which C++ compiler this machine has for the native kernels, by the names that their build looks for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping


def find_compiler(environ: Mapping[str, str]) -> str:
    """Path of CXX's compiler, g++ or clang++, the first that is there; "" for none."""
    named = (environ.get("CXX", "").split() or [""])[0]
    found = (shutil.which(name, path=environ.get("PATH")) for name in (named, "g++", "clang++") if name)
    return next((path for path in found if path), "")
