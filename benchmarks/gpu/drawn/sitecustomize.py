"""Python imports this at its start wherever the folder is on PYTHONPATH: processes of a served stack then
load weights that are drawn on the device, as `benchmarks.gpu.random_model` does it, not a file of zeros.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_READER = "engine.model.reading"


class _Drawn(importlib.abc.MetaPathFinder):
    """Replaces the reader of weights in the module that uses it, once that is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own, with a step after its execution."""
        if name != _READER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            import torch

            from benchmarks.gpu.random_model import RandomReader

            torch.manual_seed(0)
            module.WeightReader = RandomReader  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Drawn())
