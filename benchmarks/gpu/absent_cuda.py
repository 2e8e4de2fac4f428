"""Lets torch's build for CUDA be imported where CUDA's libraries are not, by the Python whose torch it is:
`PYTHON benchmarks/gpu/absent_cuda.py`, on a machine that has `ldd`, `nm` and `cc`.

Those libraries are gigabytes, and without a device nothing of them is called. Each one that is missing is
made up beside torch's own; a function of theirs ends the process. CUDA's runtime, which says how many
devices there are, and its profiler are small, and must be installed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

# All functions lie in this one, whose own have no versions: others are then found, whatever their version.
HOLDS_ALL = "libnccl.so.2"
FUNCTION = re.compile(r"^ +U ((?:cu(?!da)|nccl|nvshmem)\w+)", re.MULTILINE)


def printed(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_up(folder: Path) -> list[str]:
    """Libraries that those of torch in `folder` need and do not find; returns their names."""
    libraries = sorted(folder.glob("libtorch*.so"))
    missing = set(re.findall(r"(\S+) => not found", printed("ldd", *libraries)))
    functions = set(FUNCTION.findall(printed("nm", "--dynamic", "--undefined-only", *libraries)))
    traps = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in sorted(functions))
    for name in missing:
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(folder / name)]
        subprocess.run(command, input=traps if name == HOLDS_ALL else "", check=True, text=True)
    return sorted(missing)


if __name__ == "__main__":
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is installed"
    assert found.origin is not None, "torch is a package"
    made = make_up(Path(found.origin).parent / "lib")
    print("made up:", ", ".join(made) or "nothing: all of CUDA is there")
