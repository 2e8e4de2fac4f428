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


class Dying:
    """A gateway that is healthy, takes a request, and dies of it, or with it."""

    def __init__(self) -> None:
        self.num_taken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        self.num_taken += bool(head)
        writer.transport.abort()


async def test_requests_that_it_took_and_did_not_begin_to_answer_go_to_another_one(tmp_path: Path) -> None:
    edge, dying = Edge(tmp_path), Dying()
    await edge.start(with_other=True)
    port = edge.other_http.port
    await edge.other_http.stop()
    server = await asyncio.start_server(dying.serve, "127.0.0.1", port)
    try:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {GOOD_KEY}"}) as client:
            async with asyncio.timeout(60):
                while not dying.num_taken:
                    assert (await client.get(f"http://{edge.address}/v1/models")).status_code == 200
    finally:
        server.close()
        await edge.stop()


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
