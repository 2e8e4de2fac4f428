"""Runs the parts one after another, each in a process of its own with a limit of its own.

    python -m benchmarks.gpu [--only NAME ...] [--out FOLDER] [--limit-s 570] [--rehearse]

A part writes FOLDER/gpu-NAME.json while it runs; one that crashes or runs out of time loses what it had not
measured yet, and the others nothing. The exit code is 1 when one did.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.summary import show, summarize


@dataclass(frozen=True)
class Part:
    """One process. `kind` is an argument of its module's `run`."""

    module: str
    # Its share of the time.
    seconds: float
    kind: str = ""


PARTS = {
    "kernels": Part("kernels", 90),
    "linear": Part("linear", 60),
    "model_bf16": Part("model", 75, "bf16"),
    "model_fp8": Part("model", 75, "fp8"),
    "serving_fp8": Part("serving", 110, "fp8"),
    "peers": Part("peers", 80),
    "serving_bf16": Part("serving", 70, "bf16"),
}
# Asked for by name alone.
EXTRA = {"smoke": Part("smoke", 60), "tune": Part("tune", 560)}
RESULTS = Path("benchmarks/results")
# Their figures mean nothing, so they are kept away from the others.
REHEARSED = Path("build/gpu-rehearsal")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *EXTRA], default=list(PARTS))
    parser.add_argument(
        "--out", type=Path, default=None, help=f"folder of the figures; {RESULTS}, of rehearsals {REHEARSED}"
    )
    parser.add_argument("--limit-s", type=float, default=570.0, help="time for everything")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = REHEARSED if options.rehearse else RESULTS
    return options


def main() -> int:
    """Runs what is asked for."""
    options = arguments()
    if options.part:
        return run_part(options.part, options.out, rehearses=options.rehearse)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit_s
    failed = []
    for place, name in enumerate(options.only):
        later = sum((PARTS | EXTRA)[other].seconds for other in options.only[place + 1 :])
        left = deadline - time.monotonic()
        # A part may use what those before it left over, but not what those after it need.
        limit = min(left, max((PARTS | EXTRA)[name].seconds, left - later))
        if limit < 10:
            print(f"{name}: no time left")
            failed.append(name)
            continue
        print(f"{name} (up to {limit:.0f} s)", flush=True)
        began = time.monotonic()
        reason = _in_own_process(name, options, limit)
        print(f"{name}: {reason or 'done'} after {time.monotonic() - began:.0f} s", flush=True)
        if reason:
            failed.append(name)
    show(summarize(options.out))
    print(f"figures in {options.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _in_own_process(name: str, options: argparse.Namespace, limit: float) -> str:
    """Why the part did not finish; empty when it did."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--out", str(options.out)]
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        "BENCHMARK_LIMIT_S": str(limit),
        "BENCHMARK_OUT": str(options.out),
    }
    if options.rehearse:
        command.append("--rehearse")
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(command, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "out of time"
    return f"exit code {done.returncode}" if done.returncode else ""


def run_part(name: str, out: Path, *, rehearses: bool) -> int:
    """One part, in this process."""
    from benchmarks.gpu.device import Gpu
    from benchmarks.gpu.report import Report

    if rehearses:
        from engine.kernels.interpreter import round_as_hardware_does

        round_as_hardware_does()
    part = (PARTS | EXTRA)[name]
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    gpu = Gpu(rehearses=rehearses)
    report = Report(out / f"gpu-{name}.json", str(module.TITLE), gpu.facts())
    module.run(gpu, report, **({"kind": part.kind} if part.kind else {}))
    report.finish()
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
