"""Stand-ins for CUDA's libraries let what needs them be loaded, as torch's build for CUDA is."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.absent_cuda import HOLDS_ALL, make_up


def library(path: Path, code: str, *options: str) -> None:
    """One whose functions must all be there when it is loaded."""
    command = ["cc", "-shared", "-fPIC", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN", "-x", "c", "-", "-o", str(path)]
    command += ["-Wl,--no-as-needed", f"-L{path.parent}", f"-Wl,-soname,{path.name}", *options]
    subprocess.run(command, input=code, check=True, text=True)


def test_what_is_missing_is_made_up(tmp_path: Path) -> None:
    versioned = tmp_path / "versions"
    versioned.write_text("CUBLAS_13 { *; };")
    library(
        tmp_path / "libcublas.so.13", "int cublasCreate() { return 1; }", f"-Wl,--version-script={versioned}"
    )
    library(tmp_path / HOLDS_ALL, "int ncclSend() { return 2; }")
    torch = tmp_path / "libtorch_cuda.so"
    code = "int cublasCreate(); int ncclSend(); int answer() { return 42; }"
    code += "int never() { return cublasCreate() + ncclSend(); }"
    library(torch, code, "-l:libcublas.so.13", f"-l:{HOLDS_ALL}")
    for name in ("libcublas.so.13", HOLDS_ALL):
        (tmp_path / name).unlink()
    with pytest.raises(OSError, match="cannot open shared object file"):
        ctypes.CDLL(str(torch))
    assert make_up(tmp_path) == ["libcublas.so.13", HOLDS_ALL]
    assert ctypes.CDLL(str(torch)).answer() == 42
    assert make_up(tmp_path) == []
