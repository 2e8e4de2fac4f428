"""Compiles every Triton kernel for real GPUs on a machine that has none, and says what the code uses.

`python -m benchmarks.gpu.compile_ahead [--arch 80 90] [--only NAME ...] [--beside FILE]` prints
registers per thread, spilled bytes, shared memory and Hopper's own instructions of each variant, and exits
with 1 when one does not compile, spills more than is stated here, asks for more shared memory than a block
can have, or has its matrix products serialized. The variants call the launching functions in the shapes of
real models, on torch's "meta" device, so that what is compiled is what is launched.
What another environment wrote, with another release of Triton, has columns beside these (`make
test-gpu-versions` makes one).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.variants import variants

# Shared memory that one block may ask for, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
FIRST_ARCH_WITH_FLOAT8 = 89
# Bytes of registers that a thread may spill, by release of Triton; none where nothing is stated. 3.6 spills
# a few, most in prefill attention in float32 over keys of 256; 3.9, whose assembler for sm_90 is a newer one
# (13.4, where 12.9 spills nothing), most in that over latent keys.
STATED_SPILLS = {"3.6.0": 28, "3.9.0": 40}
# Hopper's own products of groups of warps, and bulk copies of tiles, as PTX writes them.
INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "tma": "cp.async.bulk.tensor"}
SERIALIZED = "wgmma.mma_async instructions are serialized"


@dataclass(frozen=True, kw_only=True)
class KernelUsage:
    """What the machine code of one variant's kernel uses; the most of it, where launches differ."""

    name: str
    arch: int
    triton: str
    # Release of ptxas.
    assembler: str = ""
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    # Which of INSTRUCTIONS it has.
    instructions: tuple[str, ...] = ()
    # Whether the assembler makes matrix products wait for each other.
    serialized: bool = False
    # Why there is none.
    failed: str = ""

    @property
    def fits(self) -> bool:
        """Whether it compiles, spills no more than is stated, fits a block's shared memory, and its matrix
        products do not wait for each other.
        """
        if self.failed or self.serialized or self.spilled_bytes > STATED_SPILLS.get(self.triton, 0):
            return False
        return self.shared_bytes <= SHARED_LIMIT[self.arch]

    @property
    def cells(self) -> str:
        """Registers, spilled bytes, KiB of shared memory and Hopper's instructions, for a table."""
        if self.failed:
            return f"{'does not compile':<44}"
        words = " ".join((*self.instructions, *(() if self.fits else ("does not fit",))))
        return f"{self.registers:>5}{self.spilled_bytes:>8}{self.shared_bytes / 1024:>8.1f} {words:<22}"


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


class Assembling:
    """Stands for `subprocess` in Triton's compiler: keeps what its assembler says, by the PTX of a kernel.
    Releases give the assembler different options, so that it makes different code of the same PTX.
    """

    said: ClassVar[dict[str, str]] = {}

    def run(self, command: Sequence[str], *, check: bool, stderr: Any, **options: Any) -> object:
        """Assembles."""
        done = subprocess.run(command, check=check, stderr=stderr, **options)
        source = next(part for part in command if part.endswith(".ptx"))
        self.said[Path(source).read_text()] = Path(stderr.name).read_text()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


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


def compile_all(archs: Sequence[int], only: Sequence[str] = ("",)) -> list[KernelUsage]:
    """Usage of the kernels of every variant whose name has one of `only`, on every architecture that has its
    types.
    """
    usages: dict[tuple[str, int], KernelUsage] = {}
    nvidia.subprocess = Assembling()
    for arch in archs:
        driver.set_active(AbsentGpu(arch))
        wanted: list[tuple[str, Callable[[], Any]]] = []
        for name, launch in variants(arch):
            if any(part in name for part in only):
                with noting_launches(arch) as launches:
                    launch()
                wanted += [(f"{name}: {kernel}", compiles) for kernel, compiles in launches]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for usage in pool.map(partial(_usage, arch), wanted):
                known = usages.setdefault((usage.name, arch), usage)
                usages[usage.name, arch] = _most(known, usage)
    return list(usages.values())


def _most(one: KernelUsage, other: KernelUsage) -> KernelUsage:
    """The most that either takes."""
    return dataclasses.replace(
        one,
        registers=max(one.registers, other.registers),
        spilled_bytes=max(one.spilled_bytes, other.spilled_bytes),
        shared_bytes=max(one.shared_bytes, other.shared_bytes),
        instructions=tuple(dict.fromkeys((*one.instructions, *other.instructions))),
        serialized=one.serialized or other.serialized,
        failed=one.failed or other.failed,
    )


def _usage(arch: int, wanted: tuple[str, Callable[[], Any]]) -> KernelUsage:
    """As the assembler reports it."""
    name, compiles = wanted
    assembler = nvidia.get_ptxas(arch).version
    usage = KernelUsage(name=name, arch=arch, triton=triton.__version__, assembler=assembler)
    try:
        compiled = compiles()
    except Exception as error:
        # Each failure is a line of the table: the other kernels are wanted, too.
        reasons = [each for each in (error, error.__cause__) if each is not None]
        return dataclasses.replace(
            usage, failed=" <- ".join(f"{type(each).__name__}: {each}" for each in reasons)
        )
    ptx = str(compiled.asm["ptx"])
    if ptx not in Assembling.said:
        # Compiled before, by a process of which nobody knows what it was told.
        nvidia.CUDABackend(GPUTarget("cuda", arch, 32)).make_cubin(ptx, {}, compiled.metadata, arch)
    said = Assembling.said[ptx]
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    return dataclasses.replace(
        usage,
        registers=max(registers, default=0),
        spilled_bytes=sum(spilled),
        shared_bytes=int(compiled.metadata.shared),
        instructions=tuple(name for name, text in INSTRUCTIONS.items() if text in ptx),
        serialized=SERIALIZED in said,
    )


def read(path: Path) -> list[KernelUsage]:
    """What `--write` left."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [KernelUsage(**(each | {"instructions": tuple(each["instructions"])})) for each in found]


def as_json(usages: Sequence[KernelUsage]) -> str:
    """A list with a line for each kernel."""
    return "[\n" + ",\n".join(json.dumps(dataclasses.asdict(usage)) for usage in usages) + "\n]"


def show(usages: Sequence[KernelUsage]) -> None:
    """A line per variant's kernel and architecture, with columns for each release of Triton."""
    releases = list(dict.fromkeys(usage.triton for usage in usages))
    print(f"{'':80}" + "".join(f"  {'Triton ' + release:<44}" for release in releases))
    print(f"{'kernel':74}{'arch':>6}" + f"  {' regs spilled     KiB of Hopper':<44}" * len(releases))
    found = {(usage.name, usage.arch, usage.triton): usage for usage in usages}
    for name, arch in dict.fromkeys((usage.name, usage.arch) for usage in usages):
        cells = [found[name, arch, release].cells for release in releases if (name, arch, release) in found]
        print(f"{name:74}{'sm_' + str(arch):>6}  " + "  ".join(cells))
    for usage in usages:
        if usage.failed:
            print(f"\n{usage.name}, sm_{usage.arch}, Triton {usage.triton}: {usage.failed}")


def main() -> int:
    """Prints the table; 1 when a variant does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT)
    )
    parser.add_argument("--only", nargs="+", default=[""], help="variants whose name contains one of these")
    parser.add_argument("--beside", type=Path, help="what --write wrote with another release of Triton")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", type=Path, help="a file for the figures as JSON, beside the table")
    arguments = parser.parse_args()
    usages = compile_all(arguments.arch, arguments.only)
    if arguments.beside is not None:
        usages += read(arguments.beside)
    if arguments.write is not None:
        arguments.write.write_text(as_json(usages) + "\n", encoding="utf-8")
    if arguments.json:
        print(as_json(usages))
    else:
        show(usages)
    return 0 if all(usage.fits for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
