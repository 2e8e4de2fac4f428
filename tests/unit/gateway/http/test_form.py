"""Forms are read piece by piece, wherever the network has cut them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.faces.openai.errors import ERRORS
from gateway.http.exchange import Exchange
from gateway.http.form import form_pieces

BOUNDARY = b"xyz"
TYPE = b"multipart/form-data; boundary=xyz"


def part(name: str, data: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    head = f'--xyz\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def uploaded(body: bytes, sizes: list[int], content_type: bytes = TYPE, limit: int = 1 << 30) -> Exchange:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(body[start : start + size])
        start += size
    pieces.append(body[start:])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    scope = {"method": "POST", "path": "/v1/files", "headers": [(b"content-type", content_type)]}
    exchange = Exchange(scope, receive, send, 0, ERRORS)
    exchange.begin_upload(limit, len(body))
    return exchange


async def read(exchange: Exchange) -> dict[tuple[str, str | None], bytes]:
    found: dict[tuple[str, str | None], bytes] = {}
    async for piece in form_pieces(exchange):
        key = (piece.name, piece.filename)
        found[key] = found.get(key, b"") + piece.data
    return found


@pytest.mark.parametrize("seed", range(10))
async def test_parts_are_what_was_sent(seed: int) -> None:
    draw = random.Random(seed)
    data = bytes(draw.choice(b"\r\n-xyz") for _ in range(3000))
    data = data.replace(b"\r\n--xyz", b"")
    body = (
        part("purpose", b"batch") + part("file", data, "a b.jsonl") + part("empty", b"", "e") + b"--xyz--\r\n"
    )
    sizes = [draw.randrange(1, 400) for _ in range(40)]
    found = await read(uploaded(body, sizes))
    assert found == {("purpose", None): b"batch", ("file", "a b.jsonl"): data, ("empty", "e"): b""}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (part("a", b"x"), TYPE),
        (b"", TYPE),
        (b"nothing", TYPE),
        (b"{}", b"application/json"),
        (b"x", b"multipart/form-data"),
        (b"--xyz\r\ncontent-disposition: form-data; name=a" + b"x" * (2 << 20), TYPE),
        (b"".join(part(str(each), b"") for each in range(20)) + b"--xyz--\r\n", TYPE),
    ],
    ids=["no end", "empty", "text", "json", "no boundary", "endless head", "many parts"],
)
async def test_what_is_no_form_is_refused(body: bytes, content_type: bytes) -> None:
    with pytest.raises(MillraceError) as raised:
        await read(uploaded(body, [], content_type))
    assert raised.value.reason is Reason.MALFORMED_BODY
    assert "multipart/form-data" in raised.value.message


async def test_an_upload_ends_at_its_own_limit() -> None:
    exchange = uploaded(part("file", b"x" * 5000, "a") + b"--xyz--\r\n", [1000, 1000], limit=3000)
    with pytest.raises(MillraceError) as raised:
        await read(exchange)
    assert raised.value.reason is Reason.REQUEST_TOO_LARGE
