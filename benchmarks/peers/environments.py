"""One virtual environment per peer, made once and kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# First, so that nothing else decides which. PyPI's own brings gigabytes of CUDA; with
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu pip takes the CPU build of this version.
TORCH = "torch==2.13.0"


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A name beside `target` to make a file or folder under, which becomes `target` when all went well: what
    was interrupted would be taken for whole the next time.
    """
    partial = target.with_name(f"partial-{target.name}")
    if partial.is_dir():
        shutil.rmtree(partial)
    yield partial
    partial.replace(target)


def environment(folder: Path, name: str, packages: Sequence[str]) -> Path:
    """The environment's directory with `packages` installed from PyPI.

    Raises CalledProcessError with pip's own output on the terminal.
    """
    directory = folder / name
    done = directory / ".installed"
    wanted = "\n".join(packages)
    if done.exists() and done.read_text() == wanted:
        return directory
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, *packages], check=True)
    done.write_text(wanted)
    return directory
