"""Files of blocks, one each, in a folder that several engines of a machine may share.

    <engine.cache.disk_path>/<fingerprint>/<first two digits>/<hash of the block>

The fingerprint stands for everything that keys and values depend on beside the tokens (see fingerprint.py);
the hash for the tokens, the adapter and the tenant's salt (contract.prefix). A file appears under its name as
a whole, by a rename, so there is no lock that a killed process could hold: what it leaves is a file with a
name of its own, which the next trim removes. Whoever finds a file damaged removes it. Its time of
modification is that of its last use.

An entry is eight bytes that name its form, 16 bytes of checksum and the block; or, with a key, the form, 12
bytes of nonce and the block under AES-256-GCM. Both are bound to fingerprint and hash: an entry under
another's name is damaged.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from io import BufferedWriter
from itertools import count, takewhile
from pathlib import Path

_PLAIN, _SEALED = b"mrkv-p1\n", b"mrkv-s1\n"
# Names of folders and entries: a digest of 16 bytes, and the first byte of one.
_HASH, _SHARD = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_DIGEST_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 12, 16
# Names of files that are being written: this, then process and number.
_UNFINISHED = ".writing-"
# No entry is written for so long; what is older was left by a process that was killed.
_LEFT_S = 600.0
# A folder's time of change is this coarse at most: one that changed so lately may change again unnoticed.
_COARSE_NS = 2_000_000_000
# Part of the bytes that is left after a trim, so that not every write is followed by one.
_KEPT_SHARE = 0.9
# The time of use is written again after this many seconds.
_USE_S = 60.0


class EntryDamaged(Exception):
    """A file is not what was written under its name; it is removed."""


class EntryFiles:
    """The entries of one fingerprint, and the bound on all that is under `root`.

    Safe to use from several threads, and by several processes.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        *,
        entry_bytes: int,
        state_bytes: int = 0,
        max_bytes: int,
        key: bytes = b"",
    ) -> None:
        """`entry_bytes` is the size of a block, `state_bytes` that of a state where there are such; with
        `key` (32 bytes) entries are encrypted.
        """
        self.root = root
        self.folder = root / fingerprint
        self._sizes = (entry_bytes, state_bytes) if state_bytes else (entry_bytes,)
        self.max_bytes = max_bytes
        self._fingerprint = bytes.fromhex(fingerprint)
        self._cipher = None
        if key:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)
        self._numbers = count()
        self._lock = threading.Lock()
        # Entries that are there, by the first byte of their hashes, and when the folder of each changed.
        self._known: list[frozenset[bytes]] = [frozenset()] * 256
        self._own: list[set[bytes]] = [set() for _ in range(256)]
        self._changed_ns = [0] * 256
        self._used_s: dict[bytes, float] = {}
        # Of all that is under `root`, as counted last and written since.
        self.num_bytes = 0

    @property
    def file_bytes(self) -> int:
        """Size of the largest entry's file."""
        return max(self._sizes) + self._head_bytes

    @property
    def _head_bytes(self) -> int:
        return len(_PLAIN) + (_DIGEST_BYTES if self._cipher is None else _NONCE_BYTES + _TAG_BYTES)

    def __contains__(self, block_hash: bytes) -> bool:
        shard = block_hash[0]
        return block_hash in self._known[shard] or block_hash in self._own[shard]

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """How many of the first contents are there, as far as is known."""
        return sum(1 for _ in takewhile(self.__contains__, hashes))

    def look(self) -> None:
        """Takes in what other engines have written and removed: folders that have changed are read again."""
        for shard in range(256):
            folder = self.folder / f"{shard:02x}"
            try:
                changed_ns = folder.stat().st_mtime_ns
                if changed_ns == self._changed_ns[shard]:
                    continue
                names = os.listdir(folder)
            except FileNotFoundError:
                names, changed_ns = [], 0
            is_settled = time.time_ns() - changed_ns > _COARSE_NS
            found = frozenset(filter(None, map(_hash_of, names)))
            with self._lock:
                self._known[shard], self._own[shard] = found, set()
                self._changed_ns[shard] = changed_ns if is_settled else 0

    def write(self, block_hash: bytes, block: memoryview) -> None:
        """Writes an entry. Raises OSError, and leaves nothing then."""
        place = self._path(block_hash)
        unfinished = place.with_name(f"{_UNFINISHED}{os.getpid()}-{next(self._numbers)}")
        pieces = self._pieces(block_hash, block)
        try:
            with _created(unfinished) as file:
                for piece in pieces:
                    file.write(piece)
            unfinished.rename(place)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        with self._lock:
            self._own[block_hash[0]].add(block_hash)
            self._used_s[block_hash] = time.monotonic()
            self.num_bytes += len(block) + self._head_bytes

    def read(self, block_hash: bytes) -> bytes | memoryview | None:
        """A block, None where no such entry is there any more. Raises EntryDamaged."""
        place = self._path(block_hash)
        try:
            data = place.read_bytes()
            block = self._opened(block_hash, data)
        except FileNotFoundError:
            self._forget(block_hash)
            return None
        except (OSError, ValueError) as error:
            self._remove(block_hash)
            raise EntryDamaged(f"{place}: {error}") from error
        self.use((block_hash,))
        return block

    def use(self, hashes: Sequence[bytes]) -> None:
        """Entries that are of use now are the last to go."""
        now = time.monotonic()
        for block_hash in hashes:
            if block_hash in self and now - self._used_s.get(block_hash, -_USE_S) >= _USE_S:
                self._used_s[block_hash] = now
                try:
                    os.utime(self._path(block_hash))
                except OSError:
                    self._forget(block_hash)
        if len(self._used_s) > 1 << 16:
            self._used_s = {each: since for each, since in self._used_s.items() if now - since < _USE_S}

    def trim(self, max_bytes: int | None = None) -> int:
        """Counts everything under `root`, and removes what was not used for longest where that is more than
        `max_bytes` (or the bound). Returns the number of entries removed.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        entries = sorted(self._all())
        total = sum(size for _, size, _ in entries)
        num_removed = 0
        if total > limit:
            for _, size, path in entries:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    num_removed += 1
                total -= size
                if total <= _KEPT_SHARE * limit:
                    break
        self.num_bytes = total
        if num_removed:
            self._changed_ns = [0] * 256
            self.look()
        return num_removed

    def _all(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every entry; what killed processes have left is removed."""
        for own in _folders(self.root, _HASH):
            for folder in _folders(own, _SHARD):
                for name in os.listdir(folder):
                    path = os.path.join(folder, name)
                    is_unfinished = name.startswith(_UNFINISHED)
                    if not is_unfinished and _hash_of(name) is None:
                        continue
                    try:
                        status = os.stat(path)
                        if is_unfinished and time.time() - status.st_mtime > _LEFT_S:
                            os.unlink(path)
                            continue
                    except OSError:
                        continue
                    yield status.st_mtime, status.st_size, path

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / name

    def _place(self, block_hash: bytes) -> bytes:
        return self._fingerprint + block_hash

    def _pieces(self, block_hash: bytes, block: memoryview) -> tuple[bytes | memoryview, ...]:
        place = self._place(block_hash)
        if self._cipher is None:
            return _PLAIN, blake2b(block, digest_size=_DIGEST_BYTES, key=place).digest(), block
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _SEALED, nonce, self._cipher.encrypt(nonce, block, place)

    def _opened(self, block_hash: bytes, data: bytes) -> bytes | memoryview:
        """The block of an entry; raises ValueError."""
        form = _PLAIN if self._cipher is None else _SEALED
        expected = [size + self._head_bytes for size in self._sizes]
        if len(data) not in expected or not data.startswith(form):
            told = " or ".join(map(str, expected))
            raise ValueError(f"{len(data)} bytes, expected {told} that begin with {form!r}")
        place, rest = self._place(block_hash), memoryview(data)[len(form) :]
        if self._cipher is None:
            block = rest[_DIGEST_BYTES:]
            found = blake2b(block, digest_size=_DIGEST_BYTES, key=place).digest()
            if not hmac.compare_digest(found, rest[:_DIGEST_BYTES]):
                raise ValueError("its checksum is not that of its content")
            return block
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(bytes(rest[:_NONCE_BYTES]), rest[_NONCE_BYTES:], place)
        except InvalidTag as error:
            raise ValueError("it was not encrypted with this key for this place") from error

    def _remove(self, block_hash: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(block_hash).unlink()
        self._forget(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        shard = block_hash[0]
        with self._lock:
            self._own[shard].discard(block_hash)
            self._known[shard] = self._known[shard] - {block_hash}
            self._changed_ns[shard] = 0


def _created(path: Path) -> BufferedWriter:
    """A new file that its owner alone may read, with its folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    return os.fdopen(descriptor, "wb")


def _hash_of(name: str) -> bytes | None:
    """The hash that a file's name says; None for what is no entry."""
    return bytes.fromhex(name) if _HASH.fullmatch(name) else None


def _folders(path: str | Path, pattern: re.Pattern[str]) -> list[str]:
    """Paths of the folders inside one that this module makes; whatever else is there is left alone."""
    try:
        with os.scandir(path) as found:
            return [each.path for each in found if pattern.fullmatch(each.name) and each.is_dir()]
    except FileNotFoundError:
        return []
