"""A gateway that is gone before Envoy knows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from .edge import GOOD_KEY, Edge

NUM_REQUESTS = 12


async def _both_are_healthy(client: httpx.AsyncClient, edge: Edge) -> bool:
    clusters = (await client.get(f"{edge.admin}/clusters")).text
    ports = (edge.http.port, edge.other_http.port)
    return all(f"127.0.0.1:{port}::health_flags::healthy" in clusters for port in ports)


async def test_requests_that_it_never_got_go_to_another_one(tmp_path: Path) -> None:
    edge = Edge(tmp_path)
    await edge.start(with_other=True)
    try:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {GOOD_KEY}"}) as client:
            async with asyncio.timeout(30):
                while not await _both_are_healthy(client, edge):
                    await asyncio.sleep(0.02)
            await edge.other_http.stop()
            # Some of them are given to the one that is gone, unless a health check has been quicker.
            answers = [await client.get(f"http://{edge.address}/v1/models") for _ in range(NUM_REQUESTS)]
            assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
    finally:
        await edge.stop()
