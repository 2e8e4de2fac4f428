"""The relay that notes what passes between a client and a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from benchmarks.peers.recorder import recorder
from services.bench.client import BenchTarget
from services.bench.run import run_workload
from services.bench.workload import Arrivals, Lengths, Workload

_GAP_S = 0.05
_TOKENS = 4


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a request's head; none at the end of the connection."""
    while (line := await reader.readline()).strip():
        yield line


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, each answered by tokens with pauses between them."""
    while head := b"".join([line async for line in _lines(reader)]):
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        usage = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": %d}}' % _TOKENS
        for event in (*(b'{"choices": [{"text": "x"}]}' for _ in range(_TOKENS)), usage, b"[DONE]"):
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(_GAP_S)
        writer.write(b"0\r\n\r\n")


async def test_what_passes_is_noted_and_passed_on() -> None:
    listener = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    workload = Workload(
        num_requests=4,
        arrivals=Arrivals(concurrency=2),
        input_tokens=Lengths.parse("3"),
        output_tokens=Lengths.parse(str(_TOKENS)),
    )
    with recorder(f"http://127.0.0.1:{port}") as relay:
        target = BenchTarget.parse(relay.url, "")
        records, _ = await run_workload(target, workload, "m", on_progress=lambda _record: None)
        seen = relay.take()
        assert relay.take() == []
    listener.close()
    assert [each.error for each in (*records, *seen)] == [""] * 8
    assert [each.completion_tokens for each in seen] == [_TOKENS] * 4
    for said, noted in zip(sorted(records, key=lambda record: record.start_s), seen, strict=True):
        assert len(noted.chunk_times_s) == len(said.chunk_times_s) == _TOKENS
        # The client's clock is the same one, and it begins before the relay and hears of tokens after it.
        assert said.start_s <= noted.start_s
        assert all(own >= there for own, there in zip(said.chunk_times_s, noted.chunk_times_s, strict=True))
