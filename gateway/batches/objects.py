"""The bytes of files in object storage that speaks S3's protocol, through obstore (Apache's object_store).

Bytes go up in parts and come down in ranges, a few of them in memory at a time, whatever a file's size. A
download is made of ranges of one version of an object: a client that reads slowly holds no connection to the
storage, and a range that fails is asked for again. Credentials are those of the configuration, or else what
AWS's own programs would use: environment, web identity, the machine's role.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from contract.errors import MillraceError, Reason
from gateway.batches.content import Beat, write_file
from gateway.config import ObjectStorageConfig
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)
_SETTING = "gateway.batches.s3"
# Of an upload at least, and of a download; S3 has at most so many parts of an object.
_PART_BYTES = 8 * 1024 * 1024
_MAX_PARTS = 10_000
# Parts of one upload that are in memory.
_PARTS_TOGETHER = 2
# A request is tried again for so long; then whoever waits for it is told.
_RETRIES, _RETRY_S = 4, 20
_TIMEOUTS = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_CLIENT_RETRY_S = 5.0


class BucketStorage:
    """See ContentStorage; objects of one bucket whose names begin with the prefix."""

    def __init__(self, config: ObjectStorageConfig) -> None:
        """Raises ConfigError."""
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{_SETTING}.bucket: the client of object storage, {error.name!r}, is not installed; "
                "pip install 'millrace[s3]', or leave the bucket out to keep files in the directory"
            ) from error
        self._client, self._exceptions = obstore, exceptions
        self.name = f"s3://{config.bucket}/{config.prefix}"
        settings: dict[str, Any] = dict(config.credentials())
        if config.endpoint:
            settings["endpoint"] = config.endpoint
        if config.region:
            settings["region"] = config.region
        try:
            self._store = S3Store(
                config.bucket,
                prefix=config.prefix or None,
                config=settings,
                client_options={**_TIMEOUTS, "allow_http": config.endpoint.startswith("http://")},
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{_SETTING}: {_first_line(error)}") from error

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Has errors of the storage be FileNotFoundError, or in the log and STORE_UNAVAILABLE."""
        try:
            yield
        except (FileNotFoundError, self._exceptions.NotFoundError) as error:
            if "NoSuchBucket" not in str(error):
                raise FileNotFoundError(f"{self.name}: {_first_line(error)}") from error
            raise self._unavailable(error) from error
        except self._exceptions.BaseError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> MillraceError:
        _log.error("%s cannot be used: %s", self.name, _first_line(error))
        return MillraceError(
            Reason.STORE_UNAVAILABLE,
            f"the object storage of files ({_SETTING}) cannot be used now; try again",
            retry_after_s=_CLIENT_RETRY_S,
        )

    def publish(self, id_: str, source: Path, beat: Beat) -> None:
        """See ContentStorage. Until it is whole nobody sees it."""
        num_bytes = source.stat().st_size
        if num_bytes <= _PART_BYTES:
            with self._telling():
                self._client.put(self._store, id_, source.read_bytes(), use_multipart=False)
            return
        size = max(_PART_BYTES, math.ceil(num_bytes / _MAX_PARTS))
        parts = _Parts(source, size, beat)
        try:
            with self._telling():
                options = {"use_multipart": True, "chunk_size": size, "max_concurrency": _PARTS_TOGETHER}
                self._client.put(self._store, id_, iter(parts), **options)
        except Exception:
            # The client has its own words for what our side raised.
            if parts.error is not None:
                raise parts.error from None
            raise

    def fetch(self, id_: str, folder: Path, beat: Beat) -> Path:
        """See ContentStorage."""
        path, part = folder / "input", folder / "input.part"
        if not path.exists():
            write_file(part, self.pieces(id_), beat)
            part.rename(path)
        return path

    def pieces(self, id_: str) -> Iterator[bytes]:
        """See ContentStorage."""
        with self._telling():
            try:
                found = self._client.head(self._store, id_)
            except (FileNotFoundError, self._exceptions.NotFoundError):
                # The refusal of a GET has a body, which says whether it is the bucket that is missing.
                found = self._client.get(self._store, id_).meta
        return self._ranges(id_, found["size"], found["e_tag"])

    def _ranges(self, id_: str, num_bytes: int, version: str | None) -> Iterator[bytes]:
        for start in range(0, num_bytes, _PART_BYTES):
            wanted = (start, min(start + _PART_BYTES, num_bytes))
            with self._telling():
                asked = {"range": wanted, "if_match": version}
                piece = bytes(self._client.get(self._store, id_, options=asked).bytes())
            if len(piece) != wanted[1] - wanted[0]:
                raise self._unavailable(OSError(f"{id_}: {len(piece)} bytes came of the range {wanted}"))
            yield piece

    def delete(self, id_: str) -> None:
        """See ContentStorage."""
        try:
            with self._telling():
                self._client.delete(self._store, id_)
        except FileNotFoundError:
            # S3 itself says nothing of it.
            pass


class _Parts:
    """A file in parts, and what kept one from being read."""

    def __init__(self, source: Path, size: int, beat: Beat) -> None:
        self._source, self._size, self._beat = source, size, beat
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._source.open("rb") as file:
                while piece := file.read(self._size):
                    self._beat()
                    yield piece
        except Exception as error:
            self.error = error
            raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
