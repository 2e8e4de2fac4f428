"""The machine: versions, what is installed beside them, and what memory and matrix units give at best."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.report import Report

# Whose absence explains why a peer is not in the tables.
OPTIONAL = ("flash_attn", "flashinfer", "transformers", "msgspec", "llguidance", "uvicorn", "envoy")
TOOLS = ("compute-sanitizer", "nvcc", "ncu")
STATE = "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used"


def is_there(name: str) -> bool:
    """Whether a module can be imported, without doing so."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def run(gpu: Gpu, report: Report) -> None:
    """Facts, then roofs."""
    found = [name for name in OPTIONAL if is_there(name)]
    found += [name for name in TOOLS if shutil.which(name)]
    report.row(what="machine", machine=gpu.facts(), installed=found)
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={STATE}", "--format=csv,noheader"]
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        report.row(what="state", fields=STATE, values=state)
    report.row(what="roofs", **gpu.roofs().fields())
