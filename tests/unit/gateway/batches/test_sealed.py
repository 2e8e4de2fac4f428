"""Content at rest: nothing plain on the disk, and nothing that was altered, cut or put elsewhere is read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from gateway.batches.content import Upload
from gateway.batches.sealed import CHUNK_BYTES, SEALED_BYTES, ContentKeys, needed, open_sealed, opened
from gateway.batches.spool import Spool, Written
from gateway.batches.types import LineOutcome
from gateway.store.seal import RowSeal, SealBroken

KEYS = ContentKeys(["a key of the deployment that is long enough"])
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7]


def stored(
    folder: Path, plain: bytes, *, piece: int = 10_000, keys: ContentKeys = KEYS
) -> tuple[Path, RowSeal]:
    upload = Upload(folder, keys)
    for start in range(0, len(plain), piece):
        upload.write(plain[start : start + piece])
    upload.complete()
    assert upload.num_bytes == len(plain)
    return upload.path, keys.of(upload.id)


def read(path: Path, seal: RowSeal, piece: int = 4096) -> bytes:
    data = path.read_bytes()
    return b"".join(opened((data[start : start + piece] for start in range(0, len(data), piece)), seal))


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_is_read_whole_and_at_any_place(tmp_path: Path, size: int) -> None:
    draw = random.Random(size)
    plain = draw.randbytes(size)
    path, seal = stored(tmp_path, plain)
    for piece in (1000, SEALED_BYTES, 1 << 20):
        assert read(path, seal, piece) == plain
    with open_sealed(path, seal) as file:
        assert file.read() == plain
        for _ in range(20):
            start = draw.randrange(size + 1)
            file.seek(start)
            assert file.read(100) == plain[start : start + 100]
            file.seek(start)
            assert file.readline(5000) == plain[start:].partition(b"\n")[0][:5000] + (
                b"\n" if 0 <= plain.find(b"\n", start) - start < 5000 else b""
            )


def test_nothing_of_it_is_plain_and_each_file_has_its_own_key(tmp_path: Path) -> None:
    path, seal = stored(tmp_path, b"a secret of the tenant " * 100)
    other, other_seal = stored(tmp_path, b"a secret of the tenant " * 100)
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() != other.read_bytes()
    with pytest.raises(SealBroken):
        read(path, other_seal)
    assert read(other, other_seal) == read(path, seal)


def _cut(chunks: list[bytes]) -> list[bytes]:
    return chunks[:-1]


def _swapped(chunks: list[bytes]) -> list[bytes]:
    return [chunks[1], chunks[0], *chunks[2:]]


def _left_out(chunks: list[bytes]) -> list[bytes]:
    return [chunks[0], *chunks[2:]]


def _repeated(chunks: list[bytes]) -> list[bytes]:
    return [*chunks, chunks[-1]]


def _altered(chunks: list[bytes]) -> list[bytes]:
    return [*chunks[:-1], chunks[-1][:-1] + bytes([chunks[-1][-1] ^ 1])]


def _torn(chunks: list[bytes]) -> list[bytes]:
    return [*chunks[:-1], chunks[-1][: len(chunks[-1]) // 2]]


def _emptied(chunks: list[bytes]) -> list[bytes]:
    return []


@pytest.mark.parametrize("how", [_cut, _swapped, _left_out, _repeated, _altered, _torn, _emptied])
@pytest.mark.parametrize("last", [7, CHUNK_BYTES])
def test_what_was_tampered_with_is_not_read(tmp_path: Path, how: object, last: int) -> None:
    assert callable(how)
    path, seal = stored(tmp_path, os.urandom(3 * CHUNK_BYTES + last))
    data = path.read_bytes()
    chunks = [data[start : start + SEALED_BYTES] for start in range(0, len(data), SEALED_BYTES)]
    path.write_bytes(b"".join(how(chunks)))
    with pytest.raises(SealBroken):
        read(path, seal)
    with open_sealed(path, seal) as file, pytest.raises(SealBroken):
        file.read()


def test_keys_can_be_replaced_and_a_lost_one_is_named(tmp_path: Path) -> None:
    path, _ = stored(tmp_path, b"x" * 100)
    upload = Upload(tmp_path, KEYS)
    upload.write(b"y" * 100)
    upload.complete()
    newer = ContentKeys(
        ["another key of the deployment, long enough", "a key of the deployment that is long enough"]
    )
    assert read(upload.path, newer.of(upload.id)) == b"y" * 100
    with pytest.raises(SealBroken, match=r"gateway\.batches\.key_file"):
        read(upload.path, ContentKeys(["another key of the deployment, long enough"]).of(upload.id))
    with pytest.raises(SealBroken, match=r"gateway\.batches\.key_file"):
        needed(None)
    assert path.exists()


def written(position: int, text: bytes) -> Written:
    return Written(position, LineOutcome.SUCCEEDED, position % 2, text + b"\n")


def test_results_are_sealed_one_by_one_and_read_in_their_order(tmp_path: Path) -> None:
    seal = KEYS.of("batch_1")
    with Spool(tmp_path, 6, seal) as spool:
        spool.commit([written(each, b"secret %d" % each) for each in range(3)])
    # What a killed gateway had begun to write is cut.
    with (tmp_path / "output").open("ab") as file:
        file.write(b"half a result")
    with Spool(tmp_path, 6, seal) as spool:
        spool.commit([written(each, b"secret %d" % each) for each in range(2, 6)])
        assert list(spool.results(0)) == [b"secret 0\n", b"secret 2\n", b"secret 4\n"]
        assert list(spool.results(1)) == [b"secret 1\n", b"secret 3\n", b"secret 5\n"]
    assert b"secret" not in (tmp_path / "output").read_bytes() + (tmp_path / "errors").read_bytes()
    (tmp_path / "output").write_bytes((tmp_path / "errors").read_bytes())
    with Spool(tmp_path, 6, seal) as spool, pytest.raises(SealBroken):
        list(spool.results(0))
