"""The tests that need a GPU: every kernel against its reference, tokens against transformers', transfers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.report import Report

# A few of each file, since kernels are interpreted there.
REHEARSED = "test_transfers or (test_attention and captured) or test_norm or cannot_fit or offload"


def run(gpu: Gpu, report: Report) -> None:
    """All of tests/gpu, side by side where that is possible: most of the time goes into compiling."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-v", "--maxfail=20", "-rf"]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    environment = dict(os.environ)
    if gpu.rehearses:
        command += ["-k", REHEARSED]
        environment["GPU_REHEARSAL"] = "1"
    elif importlib.util.find_spec("xdist"):
        command += ["-n", "10"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(timeout=max(5.0, gpu.left_s - 5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        output.seek(0)
        judge(report, code, output.read())


def judge(report: Report, code: int | None, said: str) -> None:
    """The row of a run that ended with `code`, None when its time was up: what failed until then counts."""
    lines = said.strip().splitlines()
    row = {"what": "tests/gpu", "said": lines[-1] if lines else "nothing"}
    failed = "; ".join(line for line in lines if re.search(r"\b(FAILED|ERROR)\b|^E ", line))
    if failed or code:
        # What pytest said of each failure is wanted where no device is at hand any more.
        (report.folder / "gpu-tests.log").write_text(said, encoding="utf-8")
        report.wrong(failed[:3000] or "pytest did not run", **row)
    elif code is None:
        report.row(**row, not_measured=f"out of time; {len(re.findall(' PASSED', said))} had passed")
    else:
        report.row(**row, checked=True)
