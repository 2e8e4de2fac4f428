"""What the batches of these programs ask, and their way through the API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

URL = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 0.1


def line(number: int, model: str, num_tokens: int) -> bytes:
    """One line of a batch."""
    body = {
        "model": model,
        "max_tokens": num_tokens,
        "messages": [{"role": "user", "content": f"Tell of number {number}."}],
    }
    return json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body}).encode() + b"\n"


async def begun(client: httpx.AsyncClient, model: str, num_lines: int, num_tokens: int) -> str:
    """The path of a batch of so many lines, which has been validated."""
    lines = b"".join(line(each, model, num_tokens) for each in range(num_lines))
    sent = {"file": ("lines.jsonl", lines)}
    file = (await _sent(client, "/v1/files", files=sent, data={"purpose": "batch"}))["id"]
    asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    path = f"/v1/batches/{(await _sent(client, '/v1/batches', json=asked))['id']}"
    while (await read(client, path))["status"] == "validating":
        await asyncio.sleep(_POLL_S)
    return path


async def _sent(client: httpx.AsyncClient, path: str, **options: Any) -> dict[str, Any]:
    answer = await client.post(path, **options)
    answer.raise_for_status()
    return dict(answer.json())


async def read(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """What is at a path, as soon as a gateway answers."""
    while True:
        try:
            answer = await client.get(path)
            answer.raise_for_status()
        except httpx.HTTPError:
            await asyncio.sleep(_POLL_S)
        else:
            return dict(answer.json())
