"""What runs on a machine with a GPU alone runs here first, over tiny shapes: the phases of `make bench-gpu`,
of which one is `make test-gpu`, with nothing importable that such machines lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.lease import LEASES
from benchmarks.gpu.report import read_rows

ROOT = Path(__file__).resolve().parents[3]
# Packages of the project that a machine with only torch, Triton and the like does not have. What
# benchmarks/gpu/requirements.txt names travels along.
ABSENT = (
    "envoy",
    "gguf",
    "google",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "grpc_tools",
    "httptools",
    "jsonschema_rs",
    "opentelemetry",
    "pytest_asyncio",
    "redis",
    "sqlalchemy",
)
# Read by every Python that is started, those of a lease's phases too.
SITE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


def run_without_them(
    folder: Path, module: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -m module` from the checkout, as a machine with a GPU would. `folder` is for what it takes."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(site), os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "contract" / "stubs"))
    # Plugins that are installed here need packages that are absent there.
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p pytest_timeout",
    }
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False
    )


# Minutes: a stage of its own.
@pytest.mark.skipif("WHOLE_REHEARSAL" not in os.environ, reason="make test-rehearsal")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lease", ["first", "proof", "tune"])
def test_every_phase_of_a_lease(lease: str, tmp_path: Path) -> None:
    options = ("--rehearse", "--limit-s", "850", "--out", str(tmp_path))
    done = run_without_them(tmp_path, "benchmarks.gpu.lease", lease, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(tmp_path)
    outcomes = {row["phase"]: row["outcome"] for row in rows if "outcome" in row}
    assert outcomes.pop("compile", "done") == "done"
    assert outcomes == dict.fromkeys(LEASES[lease][0], "done")
    measured = [row for row in rows if "outcome" not in row]
    assert {row["phase"] for row in measured} == set(outcomes)
    assert all(row["rehearsed"] for row in measured)
    assert not [row for row in measured if "wrong" in row or "failed" in row]
    verdict = done.stdout.split("verdict", 1)[1]
    assert {line.split("  ")[-1].strip() for line in verdict.strip().splitlines()} <= {"rehearsal", "not run"}


def test_without_a_device_a_lease_ends_at_once(tmp_path: Path) -> None:
    done = run_without_them(
        tmp_path, "benchmarks.gpu.lease", "first", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 1
    assert "no CUDA device; --rehearse runs the same code" in done.stderr
    outcomes = [row["outcome"] for row in read_rows(tmp_path)]
    assert outcomes[0] == "exit code 1"
    assert set(outcomes[1:]) == {"not run: environment found exit code 1"}
