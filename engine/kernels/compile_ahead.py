"""Compiles every Triton kernel for real GPUs on a machine that has none, and says what the code uses.

`python -m engine.kernels.compile_ahead [--arch 80 90] [--only NAME]` prints registers per thread, spilled
bytes, shared memory and Hopper's own instructions of each variant, and exits with 1 when one spills
registers, asks for more shared memory than a block can have or has its matrix products serialized. The
variants lie beside the kernels: calls of the launching functions in the shapes of real models, on torch's
"meta" device. What is compiled is what such a call launches.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.activation import variants as activation
from engine.kernels.attention import variants as attention
from engine.kernels.experts import variants as experts
from engine.kernels.linear import variants as linear
from engine.kernels.norm import variants as norm
from engine.kernels.paged_cache import variants as paged_cache
from engine.kernels.rope import variants as rope
from engine.kernels.sampling import variants as sampling

# Shared memory that one block may ask for, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
FIRST_ARCH_WITH_FLOAT8 = 89
# Products of groups of warps, and bulk copies of tiles, as PTX writes them.
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "tma": "cp.async.bulk.tensor"}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the machine code of one variant uses."""

    name: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    # Hopper's own: of INSTRUCTIONS, those that it has.
    instructions: tuple[str, ...]
    # What the assembler says of matrix products that it makes wait for each other.
    serialized: bool

    @property
    def fits(self) -> bool:
        """Whether nothing spills or is serialized, and a block's shared memory suffices."""
        room = self.shared_bytes <= SHARED_LIMIT[self.arch]
        return room and not self.spilled_bytes and not self.serialized


class AbsentGpu:
    """What Triton asks of a GPU's driver when it compiles, for one that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        """A number for each architecture, as kernels are kept by device."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What code is made for."""
        return GPUTarget("cuda", self.arch, 32)


def variants(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names, and what launches kernels in the shapes of real models, as on an architecture."""
    others = (activation, experts, linear, norm, paged_cache, rope, sampling)
    return chain(attention.variants(f"sm_{arch}"), *(operation.variants() for operation in others))


@contextmanager
def noting_launches(arch: int) -> Iterator[list[tuple[str, Callable[[], Any]]]]:
    """Inside, kernels are not launched: their names, and what compiles them, are collected. Kernels that take
    numbers an architecture does not have are left out.
    """
    found: list[tuple[str, Callable[[], Any]]] = []
    run = JITFunction.run

    def note(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kinds = {each.dtype for each in given if isinstance(each, torch.Tensor)}
        if torch.float8_e4m3fn not in kinds or arch >= FIRST_ARCH_WITH_FLOAT8:
            # Releases differ in what they do unasked.
            options |= {"enable_fp_fusion": True}
            compiles = partial(run, kernel, *given, grid=grid, warmup=True, **options)
            found.append((kernel.fn.__name__, compiles))

    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = run


def compile_all(archs: Sequence[int], only: str = "") -> list[Usage]:
    """Usage of every variant on every architecture that has its types; of equal ones the first. Raises what
    Triton raises for code that it cannot compile.
    """
    usages: dict[str, Usage] = {}
    for arch in archs:
        driver.set_active(AbsentGpu(arch))
        wanted: list[tuple[str, Callable[[], Any]]] = []
        for name, launch in variants(arch):
            if only in name:
                with noting_launches(arch) as launches:
                    launch()
                wanted += [(f"{name}: {kernel}", compiles) for kernel, compiles in launches]
        with ThreadPoolExecutor(2) as pool:
            for (name, _), compiled in zip(wanted, pool.map(lambda pair: pair[1](), wanted), strict=True):
                if compiled.hash not in usages:
                    usages[compiled.hash] = _usage(name, arch, compiled)
    return list(usages.values())


def _usage(name: str, arch: int, compiled: Any) -> Usage:
    """As the assembler reports it."""
    ptx = str(compiled.asm["ptx"])
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        assembler = str(get_ptxas(arch).path)
        command = [assembler, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    return Usage(
        name=name,
        arch=arch,
        registers=max(registers, default=0),
        spilled_bytes=sum(spilled),
        shared_bytes=int(compiled.metadata.shared),
        instructions=tuple(name for name, text in INSTRUCTIONS.items() if text in ptx),
        serialized="wgmma.mma_async instructions are serialized" in report,
    )


def main() -> int:
    """Prints a line per variant; 1 when one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT)
    )
    parser.add_argument("--only", default="", help="variants whose name contains this")
    arguments = parser.parse_args()
    usages = compile_all(arguments.arch, arguments.only)
    print(f"{'kernel':74}{'arch':>6}{'registers':>11}{'spilled':>9}{'shared KiB':>12}  Hopper's")
    for usage in usages:
        print(
            f"{usage.name:74}{'sm_' + str(usage.arch):>6}{usage.registers:>11}{usage.spilled_bytes:>9}"
            f"{usage.shared_bytes / 1024:>12.1f}  {' '.join(usage.instructions)}"
            f"{'   serialized' if usage.serialized else ''}{'' if usage.fits else '   does not fit'}"
        )
    return 0 if all(usage.fits for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
