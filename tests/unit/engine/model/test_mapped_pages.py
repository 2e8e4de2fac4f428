"""Pages of a checkpoint's file are let go once they were read, and nothing of what they hold is lost."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.model.checkpoint import LoadRequest
from engine.model.families import read_spec
from engine.model.mapped_pages import STRIDE_BYTES, MappedPages
from engine.model.weights import LARGE_TABLE_BYTES, WeightReader
from kernels.selection import torch_kernels
from tests.unit.engine.checkpoints import make_checkpoint

NAMES = "abcdef"
SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_DONTNEED")), reason="this system does not tell"
)


def resident_kb(file: Path) -> int:
    """Resident memory of the file's mappings in this process."""
    total, counts = 0, False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_pages_are_let_go_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    count = STRIDE_BYTES // 4
    stored = {name: torch.full((count,), number) for number, name in enumerate(NAMES)}
    save_file(stored, file)
    pages = MappedPages()
    with safe_open(file, framework="pt") as handle:
        tensors = {}
        for name in NAMES:
            tensors[name] = handle.get_tensor(name)
            pages.read(tensors[name])
            assert int(tensors[name].sum()) == int(stored[name].sum())
            # Never much more than a stride, however large the file is.
            assert resident_kb(file) < 2 * STRIDE_BYTES // 1024 + 1024
        pages.let_go()
        assert resident_kb(file) < 1024
        assert all(torch.equal(tensors[name], stored[name]) for name in NAMES)


def test_memory_that_is_in_no_file_keeps_what_it_holds() -> None:
    pages = MappedPages()
    tensor = torch.ones(STRIDE_BYTES // 4)
    pages.read(tensor)
    pages.let_go()
    assert int(tensor.sum()) == tensor.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_rows_of_a_large_table_that_were_looked_up_are_resident(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "llama", "llama")
    spec = read_spec(tmp_path / "llama")
    file = tmp_path / "model.safetensors"
    rows, width = LARGE_TABLE_BYTES // 2 // 1024, 1024
    table = torch.arange(rows, dtype=torch.bfloat16)[:, None].expand(rows, width).contiguous()
    save_file({"table": table, "small": table[:8].clone()}, file)
    request = LoadRequest(folder=tmp_path, spec=spec, dtype=dtype, max_model_len=64)
    device, kernels = torch.device("cpu"), torch_kernels()
    with WeightReader(
        request, device=device, progress=lambda *_: None, kernels=kernels, is_packed=True
    ) as weights:
        kept = weights.keep("table", (rows, width))
        small = weights.keep("small", (8, width))
        weights.finish()
    # What is converted is a copy; and so is what is small, as a mapping is not kept for its sake.
    assert str(file) in Path("/proc/self/maps").read_text() or dtype == "float32"
    assert resident_kb(file) < 1024
    looked_up = kept.index_select(0, torch.tensor([3, rows - 1]))
    assert torch.equal(looked_up, table[[3, rows - 1]].to(getattr(torch, dtype)))
    assert torch.equal(small, table[:8].to(getattr(torch, dtype)))
    assert resident_kb(file) < 2048
