"""The tests that need a GPU: every kernel against its reference, tokens against transformers', transfers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.report import Report

# A few of each file, since kernels are interpreted there.
REHEARSED = "test_transfers or (test_attention and captured) or test_norm or cannot_fit or offload"


def run(gpu: Gpu, report: Report) -> None:
    """All of tests/gpu, side by side where that is possible: most of the time goes into compiling."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "--maxfail=20", "-rf"]
    command += ["-p", "no:cacheprovider", "--tb=line"]
    environment = dict(os.environ)
    if gpu.rehearses:
        command += ["-k", REHEARSED]
        environment["GPU_REHEARSAL"] = "1"
    elif importlib.util.find_spec("xdist"):
        command += ["-n", "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    row = {"what": "tests/gpu", "said": lines[-1] if lines else done.stderr[-400:]}
    if done.returncode:
        failed = "; ".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E ")))
        report.wrong(failed[:3000] or "pytest did not run", **row)
    else:
        report.row(**row, checked=True)
