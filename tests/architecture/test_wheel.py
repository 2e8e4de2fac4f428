"""The wheel is whole: an installation without the sources beside it has every package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.architecture.sources import PACKAGES, ROOT

STUBS = ("millrace", "envoy_api")


def test_wheel_has_every_package_and_the_stubs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders - {"millrace-0.1.0.dist-info"} == {*PACKAGES, *STUBS}
    for name in (
        "millrace/engine/v1/engine_pb2_grpc.py",
        "gateway/envoy/__main__.py",
        "services/cli/app.py",
        # Native kernels are compiled where they run.
        "kernels/attention/attention.cc",
        "kernels/native/op.h",
    ):
        assert name in names
    # Nothing of Envoy's own Python package is overwritten.
    assert not [name for name in names if name.startswith(("envoy/", "contract/stubs/"))]
