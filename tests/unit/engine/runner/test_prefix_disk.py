"""Files of blocks: whole or not there, bounded, bound to their place; and the threads that move them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.kv.disk import state_name
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_disk.entries import EntryDamaged, EntryFiles
from engine.runner.prefix_disk.tier import DiskTier
from engine.types.places import place_of

PRINT, OTHER_PRINT = "0a" * 16, "0b" * 16
NUM_BYTES = 2000
KEY = bytes(range(32))
FORMS = pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "encrypted"])


def hash_of(number: int) -> bytes:
    return number.to_bytes(2, "big") + bytes(14)


def block_of(number: int, num_bytes: int = NUM_BYTES) -> memoryview:
    return memoryview(np.random.default_rng(number).bytes(num_bytes))


def opened(root: Path, key: bytes = b"", *, max_bytes: int = 1 << 30, fingerprint: str = PRINT) -> EntryFiles:
    files = EntryFiles(root, fingerprint, entry_bytes=NUM_BYTES, max_bytes=max_bytes, key=key)
    files.look()
    return files


def file_of(root: Path, number: int) -> Path:
    (found,) = root.rglob(hash_of(number).hex())
    return found


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.005)


@FORMS
def test_another_process_finds_what_was_written(tmp_path: Path, key: bytes) -> None:
    opened(tmp_path, key).write(hash_of(7), block_of(7))
    again = opened(tmp_path, key)
    assert again.num_leading([hash_of(7), hash_of(8)]) == 1
    assert again.read(hash_of(7)) == block_of(7)
    assert file_of(tmp_path, 7).stat().st_mode & 0o777 == 0o600
    assert (block_of(7).tobytes() in file_of(tmp_path, 7).read_bytes()) is not bool(key)


def test_what_others_write_is_seen_by_a_look(tmp_path: Path) -> None:
    here, there = opened(tmp_path), opened(tmp_path)
    for number in range(3):
        there.write(hash_of(number), block_of(number))
        here.look()
        assert hash_of(number) in here
    there.trim(0)
    here.look()
    assert hash_of(1) not in here


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    opened(tmp_path).write(hash_of(1), block_of(1))
    other = opened(tmp_path, fingerprint=OTHER_PRINT)
    assert hash_of(1) not in other
    assert other.read(hash_of(1)) is None


@FORMS
@pytest.mark.parametrize("place", [0, 12, 30, NUM_BYTES // 2, -1])
def test_a_flipped_byte_is_found_and_the_entry_removed(tmp_path: Path, key: bytes, place: int) -> None:
    files = opened(tmp_path, key)
    files.write(hash_of(1), block_of(1))
    path = file_of(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(EntryDamaged, match=path.name):
        files.read(hash_of(1))
    assert not path.exists()
    assert hash_of(1) not in files
    assert files.read(hash_of(1)) is None


@FORMS
@pytest.mark.parametrize("num_bytes", [0, 1, NUM_BYTES])
def test_a_shortened_entry_is_damaged(tmp_path: Path, key: bytes, num_bytes: int) -> None:
    files = opened(tmp_path, key)
    files.write(hash_of(1), block_of(1))
    os.truncate(file_of(tmp_path, 1), num_bytes)
    with pytest.raises(EntryDamaged):
        files.read(hash_of(1))


@FORMS
def test_an_entry_under_the_name_of_another_is_damaged(tmp_path: Path, key: bytes) -> None:
    files = opened(tmp_path, key)
    files.write(hash_of(1), block_of(1))
    files.write(hash_of(2), block_of(2))
    file_of(tmp_path, 1).rename(file_of(tmp_path, 2))
    with pytest.raises(EntryDamaged):
        files.read(hash_of(2))


def test_an_entry_of_another_key_is_damaged(tmp_path: Path) -> None:
    opened(tmp_path, KEY).write(hash_of(1), block_of(1))
    with pytest.raises(EntryDamaged, match="key"):
        opened(tmp_path, KEY[::-1]).read(hash_of(1))


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for number in range(20):
        files.write(hash_of(number), block_of(number))
        os.utime(file_of(tmp_path, number), (1000 + number, 1000 + number))
    files._used_s.clear()
    files.use([hash_of(0)])
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not ours")
    (tmp_path / PRINT / "ff").mkdir()
    (tmp_path / PRINT / "ff" / "readme").write_text("not ours, either")
    assert files.trim(10 * files.file_bytes) == 11
    left = [number for number in range(20) if hash_of(number) in files]
    assert left == [0, *range(12, 20)]
    assert files.num_bytes == 9 * files.file_bytes
    assert foreign.exists()
    assert (tmp_path / PRINT / "ff" / "readme").exists()


def test_the_bound_is_of_all_models_together(tmp_path: Path) -> None:
    old = opened(tmp_path, fingerprint=OTHER_PRINT)
    for number in range(10):
        old.write(hash_of(number), block_of(number))
        os.utime(file_of(tmp_path, number), (1000, 1000))
    new = opened(tmp_path, max_bytes=5 * old.file_bytes)
    new.write(hash_of(100), block_of(100))
    new.trim()
    assert hash_of(100) in new
    assert new.num_bytes <= new.max_bytes


_WRITES = """
import sys
from pathlib import Path
from engine.runner.prefix_disk.entries import EntryFiles
root, fingerprint, num_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
files = EntryFiles(root, fingerprint, entry_bytes=num_bytes, max_bytes=1 << 40)
block = memoryview(bytes(num_bytes))
for number in range(1 << 16):
    files.write(number.to_bytes(2, "big") + bytes(14), block)
    print(number, flush=True)
"""


def test_a_process_killed_while_writing_leaves_whole_entries(tmp_path: Path) -> None:
    num_bytes = 4 << 20
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(tmp_path), PRINT, str(num_bytes)], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        # In the middle of an entry: its file has begun, under a name that nobody looks for.
        eventually(lambda: any(tmp_path.rglob(".writing-*")))
        process.send_signal(signal.SIGKILL)
    files = EntryFiles(tmp_path, PRINT, entry_bytes=num_bytes, max_bytes=1 << 40)
    files.look()
    found = [number for number in range(64) if hash_of(number) in files]
    assert len(found) >= 3
    for number in found:
        assert files.read(hash_of(number)) == bytes(num_bytes)
    for left in tmp_path.rglob(".writing-*"):
        os.utime(left, (1000, 1000))
    files.trim()
    assert not any(tmp_path.rglob(".writing-*"))


class Cache:
    """Arrays [N, ...] of two layers, and a tier over them."""

    def __init__(self, root: Path, *, num_blocks: int = 8, max_bytes: int = 1 << 30) -> None:
        self.tensors = [
            np.zeros((num_blocks, 2, 4, 16), np.float32),
            np.zeros((num_blocks, 2, 4, 8), np.uint16),
        ]
        # Slots of states, which take more than a block.
        self.states = [
            np.zeros((num_blocks, 3, 100), np.float32),
            np.zeros((num_blocks, 2, 4, 9), np.float32),
        ]
        one = self.bytes()
        self.files = EntryFiles(
            root,
            PRINT,
            entry_bytes=one.num_bytes,
            state_bytes=one.num_state_bytes,
            max_bytes=max_bytes,
        )
        self.now = 0.0
        self.tier = DiskTier(self.files, self.bytes, clock=lambda: self.now)

    def bytes(self) -> BlockBytes:
        return BlockBytes(self.tensors, self.states)

    def fill(self, block_id: int, number: int) -> None:
        for tensor in self.tensors:
            tensor[block_id] = np.random.default_rng(number).integers(0, 200, tensor.shape[1:])

    def content(self, block_id: int) -> list[bytes]:
        return [tensor[block_id].tobytes() for tensor in self.tensors]

    def close(self) -> None:
        self.tier.close()


def test_blocks_go_out_and_come_back_into_others(tmp_path: Path) -> None:
    with closing(Cache(tmp_path)) as cache:
        for block_id in range(4):
            cache.fill(block_id, block_id)
            cache.tier.write_later(block_id, hash_of(block_id))
        eventually(lambda: cache.tier.counters().num_written == 4)
        assert cache.tier.num_leading(map(hash_of, range(6))) == 4
        cache.tier.read_later(5, [(hash_of(each), 7 - each) for each in range(4)])
        cache.tier.read_later(6, [(hash_of(9), 3)])
        found: list[tuple[int, int]] = []
        eventually(lambda: len(found.extend(cache.tier.finished()) or found) == 2)
        assert found == [(5, 4), (6, 0)]
        assert [cache.content(7 - each) for each in range(4)] == [cache.content(each) for each in range(4)]
        assert cache.tier.counters().num_read == 4


def test_states_go_out_and_come_back_beside_blocks(tmp_path: Path) -> None:
    with closing(Cache(tmp_path)) as cache:
        for slot in range(3):
            for part in cache.states:
                part[slot] = np.random.default_rng(slot).standard_normal(part.shape[1:])
            cache.tier.write_later(place_of(slot), state_name(hash_of(slot)))
        cache.fill(0, 5)
        cache.tier.write_later(0, hash_of(0))
        eventually(lambda: cache.tier.counters().num_written == 4)
        assert hash_of(1) not in cache.files
        wanted = [(state_name(hash_of(slot)), place_of(7 - slot)) for slot in range(3)]
        cache.tier.read_later(1, [*wanted, (hash_of(0), 6)])
        found: list[tuple[int, int]] = []
        eventually(lambda: len(found.extend(cache.tier.finished()) or found) == 1)
        assert found == [(1, 4)]
        for part in cache.states:
            assert (part[7:4:-1] == part[:3]).all()
        assert cache.content(6) == cache.content(0)
        # A state that is not the one of this block, though it is whole.
        next(tmp_path.rglob(state_name(hash_of(0)).hex())).replace(file_of(tmp_path, 0))
        with pytest.raises(EntryDamaged):
            cache.files.read(hash_of(0))


def test_what_waits_is_written_before_the_end(tmp_path: Path) -> None:
    with closing(Cache(tmp_path)) as cache:
        cache.fill(0, 1)
        cache.tier.write_later(0, hash_of(1))
    assert file_of(tmp_path, 1).exists()


def test_a_block_given_away_while_it_is_read_is_not_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    reading, go_on = threading.Event(), threading.Event()

    class Slow(BlockBytes):
        def read(self, block_id: int) -> memoryview:
            reading.set()
            go_on.wait(60)
            return super().read(block_id)

    cache.close()
    cache.tier = DiskTier(cache.files, lambda: Slow(cache.tensors))
    with closing(cache):
        cache.tier.write_later(0, hash_of(1))
        assert reading.wait(60)
        cache.tier.forget(0)
        cache.fill(0, 2)
        go_on.set()
        cache.tier.write_later(1, hash_of(3))
        eventually(lambda: cache.tier.counters().num_written == 1)
    assert cache.tier.counters().num_dropped == 1
    assert hash_of(1) not in cache.files
    assert hash_of(3) in cache.files


def test_a_write_that_fails_is_counted_and_later_ones_go_on(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with closing(Cache(root)) as cache:
        # A file where the folder should be.
        root.write_text("")
        cache.tier.write_later(0, hash_of(1))
        eventually(lambda: cache.tier.counters().num_failed > 0)
        assert cache.tier.counters().num_written == 0
        root.unlink()
        cache.tier.write_later(1, hash_of(2))
        cache.now = 100.0
        cache.tier.write_later(2, hash_of(3))
        eventually(lambda: cache.tier.counters().num_written == 2)
    assert file_of(root, 3).exists()


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    with closing(Cache(tmp_path, max_bytes=20_000)) as cache:
        for number in range(64):
            cache.fill(number % 8, number)
            written = cache.tier.counters().num_written
            cache.tier.write_later(number % 8, hash_of(number))
            eventually(lambda written=written: cache.tier.counters().num_written > written)  # type: ignore[misc]
        eventually(lambda: cache.files.num_bytes <= 20_000)
        assert cache.tier.counters().num_evicted > 0
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(sizes) <= 20_000
        assert hash_of(63) in cache.files
