"""`millrace doctor`: what this machine has, and what Millrace would use of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from engine.vllm_core import environment
from runtime.config import read_tables
from runtime.errors import ConfigError
from runtime.resources import cpuinfo, num_cores
from services.compiler import find_compiler
from services.supervisor import speeds
from services.supervisor.config import BUNDLED_MODEL, DEFAULT_CONFIG, state_directory
from services.supervisor.edge import envoy_binary
from services.supervisor.ports import can_bind
from services.supervisor.state import read_state

_DEFAULT_PORT = 8080
# Instruction sets that the kernels can use, best last.
_ISA_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_ARM_FLAGS = ("asimd", "asimddp", "bf16", "i8mm", "sve")
_GIB = 1024**3


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report. `bad` means that Millrace cannot run as it is."""

    subject: str
    state: Literal["good", "note", "bad"]
    text: str


def examine() -> Iterator[MachineFinding]:
    """Everything, in the order of the report."""
    yield _python()
    yield _processor()
    yield from _hindrances()
    yield _memory()
    yield from _torch()
    yield _envoy()
    yield _compiler()
    yield _model()
    yield _port()
    yield _redis()
    yield from _vllm()
    yield from _speeds()


def _python() -> MachineFinding:
    # An older one than 3.11 does not get here: the sources do not load in it.
    return MachineFinding("python", "good", f"{platform.python_version()} at {sys.executable}")


def _processor() -> MachineFinding:
    flags = set(" ".join(cpuinfo("flags", "Features")).split())
    usable = [flag for flag in (*_ISA_FLAGS, *_ARM_FLAGS) if flag in flags]
    kind = f"{platform.machine()}, {num_cores()} cores"
    if platform.machine() == "x86_64" and flags and "avx2" not in usable:
        return MachineFinding("processor", "note", f"{kind}; no AVX2, so the slow plain kernels are used")
    return MachineFinding("processor", "good", f"{kind}; {', '.join(usable) or 'instruction sets unknown'}")


def _hindrances(system: Path = Path("/sys")) -> Iterator[MachineFinding]:
    """What of a Linux machine's settings makes it slower than it is; nothing where they cannot be read."""
    pages = _chosen(system / "kernel/mm/transparent_hugepage/enabled")
    if pages == "never":
        yield MachineFinding(
            "huge pages",
            "note",
            "off, so weights take longer to read; madvise in transparent_hugepage/enabled",
        )
    elif pages:
        yield MachineFinding("huge pages", "good", pages)
    governors = {_chosen(path) for path in system.glob("devices/system/cpu/cpu*/cpufreq/scaling_governor")}
    if "powersave" in governors and not (system / "devices/system/cpu/intel_pstate").exists():
        yield MachineFinding(
            "governor", "note", "powersave: cores stay slow; `cpupower frequency-set -g performance`"
        )
    elif governors:
        yield MachineFinding("governor", "good", ", ".join(sorted(governors)))
    if _chosen(system / "devices/system/cpu/smt/active") == "1":
        yield MachineFinding(
            "cores", "note", "two hardware threads share one: the second adds little to an engine"
        )


def _chosen(path: Path) -> str:
    """A setting's value: the one in brackets where all are listed; empty where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0] or text


def _speeds() -> Iterator[MachineFinding]:
    """What engines measured on this machine when they started."""
    name = speeds.processor_name()
    for each in speeds.read(state_directory()):
        if each.processor == name:
            quantized = "" if each.quantize == "off" else f" in {each.quantize}"
            yield MachineFinding(
                "speed", "good", f"{each.model}{quantized}: {each} ({each.kernels}, {each.day})"
            )


def _memory() -> MachineFinding:
    memory = psutil.virtual_memory()
    text = f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB available"
    return MachineFinding("memory", "good" if memory.available > 2 * _GIB else "note", text)


def _torch() -> Iterator[MachineFinding]:
    if importlib.util.find_spec("torch") is None:
        yield MachineFinding("torch", "bad", "not installed; `make install` brings it")
        return
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    yield MachineFinding("torch", "good", f"{torch.__version__}, {build}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            text = (
                f"{found.name}, {found.total_memory / _GIB:.0f} GiB, capability {found.major}.{found.minor}"
            )
            yield MachineFinding(f"gpu {index}", "good", text)
    elif shutil.which("nvidia-smi"):
        remedy = "install a CUDA build of torch" if not torch.version.cuda else "check the driver"
        yield MachineFinding("gpu", "note", f"this machine has nvidia-smi, but torch sees no GPU; {remedy}")
    else:
        yield MachineFinding("gpu", "good", "none; models run on the processor")


def _envoy() -> MachineFinding:
    try:
        binary = envoy_binary()
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except ConfigError as error:
        return MachineFinding("envoy", "bad", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return MachineFinding("envoy", "bad", f"cannot be run: {error}")
    # The last word is <commit>/<version>/<state>/<build>/<TLS library>.
    words = shown.stdout.split()
    version = words[-1].split("/")[1] if words and words[-1].count("/") >= 2 else shown.stdout.strip()
    return MachineFinding("envoy", "good", f"{version} at {binary}")


def _compiler() -> MachineFinding:
    compiler = find_compiler(os.environ)
    if not compiler:
        return MachineFinding("compiler", "note", "no C++ compiler; the native kernels cannot be built")
    return MachineFinding("compiler", "good", compiler)


def _model() -> MachineFinding:
    weights = sorted(BUNDLED_MODEL.glob("*.safetensors"))
    if not weights:
        return MachineFinding("model", "note", f"{BUNDLED_MODEL} has no weights; give one with --model")
    size = sum(path.stat().st_size for path in weights) / 1024**2
    return MachineFinding("model", "good", f"{BUNDLED_MODEL} ({size:.1f} MiB)")


def _port() -> MachineFinding:
    state = read_state(state_directory())
    if state is not None:
        return MachineFinding(
            "stack", "good", f"runs on {state.scheme}://{state.address} (process {state.pid})"
        )
    if can_bind("127.0.0.1", _DEFAULT_PORT):
        return MachineFinding("port", "good", f"{_DEFAULT_PORT} is free")
    return MachineFinding("port", "note", f"{_DEFAULT_PORT} is in use; choose another one with --port")


def _redis() -> MachineFinding:
    found = shutil.which("redis-server")
    if found is None:
        return MachineFinding(
            "redis", "note", "not installed; needed only for limits shared by several gateways"
        )
    return MachineFinding("redis", "good", found)


def _vllm() -> Iterator[MachineFinding]:
    """Whether `--engine vllm` can serve."""
    config = DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None
    try:
        yield MachineFinding("vllm", "good", environment.check(read_tables(config)))
    except ConfigError as error:
        yield MachineFinding("vllm", "note", f"needed only for `--engine vllm`: {error}")
