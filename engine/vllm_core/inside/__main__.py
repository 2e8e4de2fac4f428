"""The core process: starts vLLM, then serves the front until it goes away. Started by the front only."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from contract.frames import FrameBuffer, framed

from . import engine, plugin
from .bridge import Bridge, EngineDied

_CHUNK_BYTES = 1 << 20
# Exit codes, the same as engine.core's: 2 is a configuration error, 70 a runner that broke.
_EXIT_CONFIG, _EXIT_BROKEN = 2, 70


class Front:
    """This side's end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: dict[str, Any]) -> None:
        """Queues a report."""
        self._writer.write(framed(self._encoder.encode(report)))

    async def commands(self) -> AsyncIterator[dict[str, Any]]:
        """What the front says, until it is gone or says "stop"."""
        buffer = FrameBuffer()
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(_CHUNK_BYTES):
                for payload in buffer.feed(data):
                    command = msgspec.msgpack.decode(payload, strict=False)
                    if command["type"] == "stop":
                        return
                    yield command

    async def flush(self) -> None:
        """Waits until everything is on its way."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()


async def serve(front: Front, commands: AsyncIterator[dict[str, Any]]) -> int:
    """Until the front ends or the engine dies; the exit code."""
    start = await anext(commands, None)
    if start is None:
        return 0
    config = start["config"]
    model = {**start["model"], "token_ids": start["token_ids"], "pooling": start["pooling"]}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="millrace-vllm-") as folder:
        front.send({"type": "progress", "stage": "start vLLM", "fraction": 0.0})
        try:
            engine.check_version(config)
            plugin.register()
            settings = engine.settings_of(engine.arguments(config, model, f"ipc://{folder}/kv"))
            stages = {"configure vLLM": time.monotonic() - begun}
            front.send({"type": "progress", "stage": "load the model", "fraction": 0.0})
            vllm = await engine.VllmEngine.start(settings, model, _adapters(config))
        except (engine.CannotStart, ImportError) as error:
            front.send({"type": "refused", "message": _remedy(error)})
            await front.flush()
            return _EXIT_CONFIG
        stages["load the model"] = time.monotonic() - begun - stages["configure vLLM"]
        try:
            return await _run(front, commands, vllm, config, stages)
        finally:
            vllm.close()


def _remedy(error: Exception) -> str:
    """What the operator can do about it."""
    if isinstance(error, ImportError):
        return (
            f"engine.vllm.python: vLLM cannot be imported there ({error}); remove the environment at "
            f"{sys.prefix}, and run `millrace engine install vllm`"
        )
    return str(error)


def _adapters(config: dict[str, Any]) -> dict[str, str]:
    return dict((config.get("adapters") or {}).get("paths", {}))


async def _run(
    front: Front,
    commands: AsyncIterator[dict[str, Any]],
    vllm: engine.VllmEngine,
    config: dict[str, Any],
    stages: dict[str, float],
) -> int:
    ranks = config["vllm"]["data_parallel_size"]
    num_slots = config["scheduler"]["max_num_seqs"] * ranks
    bridge = Bridge(vllm, front.send, max_num_seqs=num_slots, num_ranks=ranks)
    # The first load report comes before readiness, so that whoever asks finds one.
    bridge.publish([])
    front.send({"type": "ready", "memory": vllm.memory, "facts": vllm.facts, "stages_s": stages})

    async def obey() -> None:
        async for command in commands:
            await bridge.command(command)

    tasks = [asyncio.ensure_future(each) for each in (obey(), bridge.read_outputs(), bridge.beat())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for each in tasks:
        each.cancel()
    failed = [each.exception() for each in done if each.exception() is not None]
    if not failed:
        return 0
    cause = f"vLLM: {failed[0]}" if isinstance(failed[0], EngineDied) else f"{failed[0]!r}"
    logging.getLogger(__name__).error("the engine is lost: %s", cause, exc_info=failed[0])
    bridge.fail_all(cause)
    front.send({"type": "broken", "cause": cause})
    await front.flush()
    return _EXIT_BROKEN


async def _main(fd: int) -> int:
    connection = socket.socket(fileno=fd)
    connection.setblocking(False)
    front = Front(*await asyncio.open_connection(sock=connection, limit=1 << 26))
    code = await serve(front, front.commands())
    await front.flush()
    return code


def main() -> int:
    """Runs until the front closes the socket or asks to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front process")
    parser.add_argument("--log-level", default="info")
    given = parser.parse_args()
    # The front's standard output is read by whoever started it; vLLM writes its log there.
    os.dup2(2, 1)
    plugin.die_with_parent()
    # A terminal's Ctrl-C reaches the whole group; the front decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", given.log_level.upper())
    with contextlib.suppress(ImportError):
        # vLLM brings it, and its own server uses it.
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    return asyncio.run(_main(given.fd))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads of vLLM, its sockets and torch's may linger; the front waits for this process.
    os._exit(code)
