"""The runner of the core process: what loading takes is left in a process that ends with it."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.model.loader import load_apart
from engine.runner import torch_runner
from engine.runner.base import Runner
from engine.types import MemoryPlan, ModelFacts
from services.config import ModelConfig


def build(
    config: EngineConfig, model: ModelConfig, progress: Callable[[str, float], None]
) -> tuple[Runner, MemoryPlan, ModelFacts]:
    """See Builder."""
    return torch_runner.build(config, model, progress, load_apart)
