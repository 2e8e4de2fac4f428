"""What the process that loads says of a table in a file leads to that table, or is refused."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.model import loader, mapped_pages
from engine.model.spec import CheckpointError

# Of a file that counts as large.
ROWS, WIDTH = 4096, 512
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped"
)


@pytest.fixture
def table(tmp_path: Path) -> NDArray[Any]:
    """Mapped from a file, as the reader of checkpoints does."""
    save_file({"table": np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)}, tmp_path / "table")
    with safe_open(tmp_path / "table", framework="pt") as file:
        found: NDArray[Any] = file.get_tensor("table").numpy()
    return found


def sent(array: NDArray[Any]) -> tuple[bytes, list[Any]]:
    """A pickle, and the bytes beside it."""
    target = io.BytesIO()
    pickler = loader._Pickler(target, {})
    pickler.dump(array)
    return target.getvalue(), [buffer.raw() for buffer in pickler.buffers]


def received(pickled: bytes, beside: list[Any]) -> NDArray[Any]:
    found: NDArray[Any] = loader._Unpickler(io.BytesIO(pickled), [], beside, lambda part: part).load()
    return found


def test_a_table_is_looked_up_in_its_file(table: NDArray[Any]) -> None:
    pickled, beside = sent(table)
    assert len(pickled) < 1000
    assert not beside
    np.testing.assert_array_equal(received(pickled, beside), table)


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def rewrite(path: Path) -> None:
    # Contents may be the same: what was written to may be half written.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [replace, rewrite, Path.unlink])
def test_another_file_is_refused(table: NDArray[Any], tmp_path: Path, change: Any) -> None:
    pickled, beside = sent(table)
    change(tmp_path / "table")
    with pytest.raises(CheckpointError, match=r"table (was replaced or written to|cannot be opened)"):
        received(pickled, beside)


@pytest.mark.parametrize("change", [replace, Path.unlink])
def test_a_table_whose_file_is_gone_is_sent(table: NDArray[Any], tmp_path: Path, change: Any) -> None:
    change(tmp_path / "table")
    pickled, beside = sent(table)
    assert [len(each) for each in beside] == [table.nbytes]
    np.testing.assert_array_equal(received(pickled, beside), table)


def test_a_file_that_takes_the_name_meanwhile_is_not_taken_for_it(
    table: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_of = mapped_pages._place_of

    def slow(address: int, num_bytes: int) -> tuple[str, int] | None:
        found = place_of(address, num_bytes)
        if not (tmp_path / "replaced").exists():
            (tmp_path / "replaced").touch()
            replace(tmp_path / "table")
        return found

    monkeypatch.setattr(mapped_pages, "_place_of", slow)
    assert sent(table)[1]
