"""What to run on a machine with a GPU that is lent for a short time.

    python -m benchmarks.gpu.lease first|proof|serve|tune [--out DIR] [--limit-s 570] [--rehearse]
    python -m benchmarks.gpu.lease verdict --out DIR

`first` says whether results are right, then how fast the model is; `proof` compares with other libraries and
measures the other formats; `serve` sends requests through sockets; `tune` searches launch shapes. Each first
compiles what it will launch, on all cores. Rows go to DIR/gpu-LEASE.jsonl as they are measured, those of
`--only` phases to a file of their own; the table of aims comes last, over all leases whose rows lie in DIR.
A phase that finds a wrong result ends the lease.
The exit code is 1 when a phase was not done.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.conductor import WRONG, Lease, Phase
from benchmarks.gpu.report import Report
from benchmarks.gpu.verdict import judge, show


@dataclass(frozen=True, kw_only=True)
class Part:
    """A phase that is a module's `run(gpu, report)`, with `kind` where it has several."""

    module: str
    # Least and most time.
    needs_s: float
    most_s: float = float("inf")
    kind: str = ""
    decides: bool = False
    # Without, it gets what the others leave.
    is_kept_for: bool = True

    @property
    def arguments(self) -> dict[str, str]:
        """For `run`."""
        return {"kind": self.kind} if self.kind else {}


PARTS = {
    "environment": Part(module="environment", needs_s=20, most_s=40, decides=True),
    "smoke": Part(module="smoke", needs_s=30, most_s=90, decides=True),
    "tests": Part(module="device_tests", needs_s=60, most_s=180, decides=True),
    "captured": Part(module="captured", needs_s=40, most_s=120, decides=True),
    "model_bf16": Part(module="model", needs_s=60, kind="bf16"),
    "sanitizer": Part(module="sanitizer", needs_s=45, most_s=150, decides=True),
    "kernels": Part(module="kernels", needs_s=50, most_s=120),
    "linear": Part(module="linear", needs_s=50, most_s=100),
    "model_fp8": Part(module="model", needs_s=45, kind="fp8"),
    "model_int4": Part(module="model", needs_s=45, kind="int4"),
    "model_moe": Part(module="model", needs_s=45, kind="moe"),
    "model_mla": Part(module="model", needs_s=45, kind="mla"),
    "speculation": Part(module="speculation", needs_s=40, most_s=90),
    "peers": Part(module="peers", needs_s=50, most_s=100),
    "served_fp8": Part(module="served", needs_s=200, most_s=270, kind="fp8"),
    "serving_fp8": Part(module="serving", needs_s=70, most_s=120, kind="fp8"),
    "serving_bf16": Part(module="serving", needs_s=70, most_s=120, kind="bf16", is_kept_for=False),
    "tune": Part(module="tune", needs_s=120),
}
# Phases of each lease, and those whose kernels are compiled before the first of them, side by side.
LEASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "first": (
        ("environment", "smoke", "tests", "captured", "model_bf16", "sanitizer"),
        ("smoke", "captured", "model_bf16"),
    ),
    "proof": (
        (
            *("environment", "kernels", "linear", "model_fp8", "model_int4"),
            *("speculation", "model_moe", "model_mla", "peers"),
        ),
        ("kernels", "linear", "model_fp8", "model_int4", "speculation", "model_moe", "model_mla"),
    ),
    "serve": (("environment", "served_fp8", "serving_fp8", "serving_bf16"), ("model_fp8", "model_bf16")),
    "tune": (("environment", "tune"), ("tune",)),
}
COMPILING_S = 150.0
NAMED_S = 10.0
# Everything is small there, and a process takes longer to start than to run.
REHEARSED_S = 5.0
RESULTS = Path("benchmarks/results")
# Their figures mean nothing, so they are kept away from the others.
REHEARSED = Path("build/gpu-rehearsal")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.lease",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lease", choices=[*LEASES, "verdict"])
    parser.add_argument(
        "--out", type=Path, default=None, help=f"folder of the rows; {RESULTS}, of rehearsals {REHEARSED}"
    )
    parser.add_argument("--limit-s", type=float, default=570.0, help="time for everything")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="these phases alone")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--go-on", action="store_true", help="do not end with a wrong result")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = REHEARSED if options.rehearse else RESULTS
    return options


def phases(options: argparse.Namespace) -> list[Phase]:
    """What the command line asks for: compiling, then the phases."""
    names, compiled = LEASES[options.lease]
    if options.only:
        names, compiled = tuple(options.only), tuple(name for name in compiled if name in options.only)
    wanted = [_phase(options, name) for name in names]
    if options.rehearse:
        # They run what the phases run.
        compiled = compiled[:1]
    if compiled:
        warm_up = Phase(
            name="compile",
            commands=[_command(options, name, "--compile") for name in compiled],
            needs_s=REHEARSED_S if options.rehearse else 20.0,
            most_s=COMPILING_S,
        )
        wanted.insert(1 if names[0] == "environment" else 0, warm_up)
    return wanted


def _phase(options: argparse.Namespace, name: str) -> Phase:
    part = PARTS[name]
    needs_s = REHEARSED_S if options.rehearse else part.needs_s
    if options.only:
        # Whoever names a phase wants what can be had of it.
        needs_s = min(needs_s, NAMED_S)
    return Phase(
        name=name,
        commands=[_command(options, name)],
        needs_s=needs_s,
        most_s=part.most_s,
        decides=part.decides,
        is_kept_for=part.is_kept_for,
    )


def _command(options: argparse.Namespace, name: str, *more: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.lease", options.lease, "--part", name]
    command += ["--out", str(options.out), "--limit-s", "{limit_s}", *more]
    command += ["--only", *options.only] if options.only else []
    return [*command, "--rehearse"] if options.rehearse else command


def rows_path(options: argparse.Namespace) -> Path:
    """The file of a lease's rows; phases that run alone have one of their own, so that no row is lost."""
    return Path(options.out, "-".join(("gpu", options.lease, *options.only)) + ".jsonl")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What the processes of a lease are started with."""
    settings = {"PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        settings["TRITON_INTERPRET"] = "1"
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | dict(os.environ) | settings


def main(argv: list[str] | None = None) -> int:
    """Runs what is asked for."""
    options = arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = rows_path(options)
    if options.part:
        return run_part(options, path)
    done = True
    if options.lease != "verdict":
        path.unlink(missing_ok=True)
        lease = Lease(
            phases=phases(options),
            path=path,
            limit_s=options.limit_s,
            environment=environment(options),
            goes_on=options.go_on,
        )
        done = lease.run()
        for name, outcome in lease.outcomes.items():
            if outcome != "done":
                print(f"{name}: {outcome}")
    show(judge(options.out))
    return 0 if done else 1


def run_part(options: argparse.Namespace, path: Path) -> int:
    """One phase, in this process."""
    from benchmarks.gpu.device import Gpu

    if options.rehearse:
        from benchmarks.gpu.interpreter import round_as_hardware_does

        round_as_hardware_does()
    part = PARTS[options.part]
    module: Any = importlib.import_module(f"benchmarks.gpu.{part.module}")
    gpu = Gpu(rehearses=options.rehearse, compiles=options.compile, limit_s=options.limit_s)
    report = Report(None if options.compile else path, options.part, rehearses=options.rehearse)
    module.run(gpu, report, **part.arguments)
    if options.compile:
        # What is computed there is measured and checked later.
        return 0
    return WRONG if report.num_wrong else int(report.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
