"""A gateway with files and batches, and a client's calls to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
numbers = iter(range(10**6))


@asynccontextmanager
async def serving(folder: Path, *engines: ScriptedEngine, **batches: Any) -> AsyncIterator[Deployment]:
    more = batches.pop("tables", {})
    tables = {
        "tenants": {"other": {}},
        **more,
        "gateway": {
            "batches": {
                "directory": str(folder / "batches"),
                "lease_s": 1.0,
                "min_free_bytes": 0,
                **batches,
            },
            "drain_limit_s": 0.05,
            **more.get("gateway", {}),
            "ledger": {"url": f"sqlite:///{folder / 'ledger.sqlite'}", "flush_interval_s": 0.01},
        },
    }
    async with deployed(*engines, tables=tables) as stack:
        yield stack


def as_tenant(tenant: str = "acme") -> dict[str, str]:
    return {CONTEXT_HEADER: signed_context(f"request-{next(numbers)}", tenant=tenant)}


async def call(
    stack: Deployment, method: str, path: str, *, tenant: str = "acme", **options: Any
) -> httpx.Response:
    return await stack.http.request(method, f"/v1/{path}", headers=as_tenant(tenant), timeout=30, **options)


async def ok(stack: Deployment, method: str, path: str, **options: Any) -> Any:
    response = await call(stack, method, path, **options)
    assert response.status_code == 200, response.text
    return response.json()


def request(name: str, text: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines
    )


async def upload(stack: Deployment, data: bytes, *, tenant: str = "acme", **fields: str) -> httpx.Response:
    sent = {"purpose": "batch", **fields}
    return await call(stack, "POST", "files", tenant=tenant, files={"file": ("lines.jsonl", data)}, data=sent)


async def create(stack: Deployment, data: bytes, *, tenant: str = "acme", **body: Any) -> dict[str, Any]:
    file = await upload(stack, data, tenant=tenant)
    assert file.status_code == 200, file.text
    asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h", **body}
    return dict(await ok(stack, "POST", "batches", tenant=tenant, json=asked))


async def until(seen: Callable[[], Awaitable[Any]], limit_s: float = 60.0) -> Any:
    async with asyncio.timeout(limit_s):
        while not (found := await seen()):
            await asyncio.sleep(0.02)
    return found


async def ended(stack: Deployment, batch: dict[str, Any], tenant: str = "acme") -> dict[str, Any]:
    async def look() -> Any:
        now = await ok(stack, "GET", f"batches/{batch['id']}", tenant=tenant)
        return now if now["status"] in ENDED else None

    return dict(await until(look))


async def results(stack: Deployment, file_id: str | None, tenant: str = "acme") -> list[dict[str, Any]]:
    if file_id is None:
        return []
    response = await call(stack, "GET", f"files/{file_id}/content", tenant=tenant)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.content.splitlines()]


def ledger_rows(folder: Path) -> list[Any]:
    engine = open_ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
    with engine.connect() as connection:
        rows = connection.execute(select(REQUESTS)).all()
    engine.dispose()
    return list(rows)
