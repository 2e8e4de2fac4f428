"""Which device serves, and how much memory it has free. Imports torch only where there is an accelerator to
ask.
"""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from kernels.config import prefer_expandable_segments
from runtime.errors import ConfigError
from runtime.resources import available_bytes


def choose_device(config: EngineConfig) -> tuple[str, int]:
    """("cpu" or "cuda", free bytes). Raises ConfigError when a configured accelerator is not there."""
    wants = config.device
    if wants == "auto":
        wants = "cuda" if Path("/dev/nvidia0").exists() and _cuda_available() else "cpu"
    if wants == "cpu":
        return "cpu", available_bytes()
    if not _cuda_available():
        raise ConfigError("engine.device = 'cuda': torch finds no CUDA device; set it to auto or cpu")
    import torch

    prefer_expandable_segments()
    return "cuda", int(torch.cuda.mem_get_info()[0])


def _cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())
