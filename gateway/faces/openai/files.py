"""Handlers of /v1/files: files that batches read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason, invalid, unsupported
from gateway.batches.content import Upload, disk_full
from gateway.batches.service import MAX_KEPT_S, MIN_KEPT_S, Batches
from gateway.batches.store import StoredFile, not_found
from gateway.faces.queries import PAGE, Query, dispatch
from gateway.http.exchange import Exchange
from gateway.http.form import form_pieces

FILES = "/v1/files"
BATCH, BATCH_OUTPUT = "batch", "batch_output"
# Purposes of files that this API shows.
PURPOSES = (BATCH, BATCH_OUTPUT)
MAX_PAGE = 10_000
# Bytes that a form has beside its file.
FORM_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 1024
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)
_encode = msgspec.json.Encoder().encode


class FileEndpoints:
    """The handlers."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/files."""
        batches, tenant = self._batches, exchange.verified_caller.identity.tenant
        try:
            upload = await batches.call(batches.begin_upload)
        except OSError as error:
            raise disk_full(error, batches.folder) from error
        try:
            filename, fields = await self._receive(exchange, upload)
            purpose, kept_s = _purpose(fields), _kept_s(fields)
            if filename is None:
                raise _without_file()
            file = await batches.keep(tenant, upload, purpose=purpose, filename=filename, kept_s=kept_s)
        finally:
            await batches.call(upload.discard)
        await exchange.respond(200, _encode(file_object(file)))

    async def _receive(self, exchange: Exchange, upload: Upload) -> tuple[str | None, dict[str, bytes]]:
        """Writes the file; its name, and the other fields."""
        filename: str | None = None
        fields: dict[str, bytes] = {}
        limit = self._batches.config.max_file_bytes
        async for piece in form_pieces(exchange):
            if piece.name == "file" and piece.filename is not None:
                filename = piece.filename
                if upload.num_bytes + len(piece.data) > limit:
                    raise MillraceError(
                        Reason.REQUEST_TOO_LARGE,
                        f"file: it is larger than the limit of {limit} bytes "
                        "(gateway.batches.max_file_bytes); split it",
                        field="file",
                        metadata={"limit_bytes": str(limit)},
                    )
                await self._batches.write(upload, piece.data)
            elif piece.name == "file":
                raise _without_file()
            elif piece.name not in _FIELDS:
                raise unsupported(piece.name[:80], "leave it out", "it is no field of this form")
            else:
                fields[piece.name] = fields.get(piece.name, b"") + piece.data
                if len(fields[piece.name]) > _MAX_FIELD_BYTES:
                    raise invalid(piece.name, f"it is longer than {_MAX_FIELD_BYTES} bytes")
        return filename, fields

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/files."""
        query = Query(exchange, (*PAGE, "purpose"))
        purpose = query.text("purpose")
        purposes = (purpose,) if purpose else PURPOSES
        page = query.page(otherwise=MAX_PAGE, most=MAX_PAGE)
        files: Sequence[StoredFile] = ()
        more = False
        if set(purposes) <= set(PURPOSES):
            store, tenant = self._batches.store, exchange.verified_caller.identity.tenant
            files, more = await self._batches.call(store.files, tenant, purposes, **page)
        await exchange.respond(200, _encode(listing([file_object(each) for each in files], more)))

    async def handle(self, exchange: Exchange) -> None:
        """Any method, for any path below /v1/files/."""
        id_, _, part = exchange.path.removeprefix(f"{FILES}/").partition("/")
        handlers = {"": {"GET": self._get, "DELETE": self._delete}, "content": {"GET": self._content}}
        await dispatch(exchange, handlers.get(part), id_)

    async def _find(self, exchange: Exchange, id_: str) -> StoredFile:
        Query(exchange, ())
        return await visible_file(self._batches, exchange.verified_caller.identity.tenant, id_)

    async def _get(self, exchange: Exchange, id_: str) -> None:
        await exchange.respond(200, _encode(file_object(await self._find(exchange, id_))))

    async def _delete(self, exchange: Exchange, id_: str) -> None:
        file = await self._find(exchange, id_)
        await self._batches.delete_file(exchange.verified_caller.identity.tenant, file.id)
        await exchange.respond(200, _encode({"id": file.id, "object": "file", "deleted": True}))

    async def _content(self, exchange: Exchange, id_: str) -> None:
        file = await self._find(exchange, id_)
        await self._batches.send(exchange, file, "application/octet-stream")


async def visible_file(batches: Batches, tenant: str, id_: str, field: str = "") -> StoredFile:
    """A file that this API shows; raises STORED_NOT_FOUND, at `field`."""
    file = await batches.call(batches.store.file, tenant, id_, field)
    if file.purpose not in PURPOSES:
        raise not_found("file", id_, field)
    return file


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file as the API writes it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_unix_ms // 1000,
        "expires_at": file.expires_unix_ms // 1000 or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def listing(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of objects."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _without_file() -> MillraceError:
    return invalid("file", "it is required, as a part of the form with a file name")


def _purpose(fields: Mapping[str, bytes]) -> str:
    purpose = fields.get("purpose")
    if purpose is None:
        raise invalid("purpose", f"it is required; use {BATCH!r}")
    if purpose != BATCH.encode():
        told = ascii(purpose.decode("utf-8", "replace")[:40])
        raise invalid("purpose", f"{told} is not served: files are for batches; use {BATCH!r}")
    return BATCH


def _kept_s(fields: Mapping[str, bytes]) -> int:
    """Seconds that the client wants it kept; 0 where it does not say."""
    if _ANCHOR not in fields and _SECONDS not in fields:
        return 0
    if fields.get(_ANCHOR) != b"created_at":
        raise invalid(_ANCHOR, "it is required beside the seconds, and is created_at")
    digits = fields.get(_SECONDS, b"")
    seconds = int(digits) if digits.isdigit() and len(digits) <= 8 else 0
    check_kept(_SECONDS, seconds)
    return seconds


def check_kept(field: str, seconds: int) -> None:
    """Raises INVALID_ARGUMENT for a time that nothing is kept for."""
    if not MIN_KEPT_S <= seconds <= MAX_KEPT_S:
        raise invalid(field, f"it is no number of seconds from {MIN_KEPT_S} to {MAX_KEPT_S}")
