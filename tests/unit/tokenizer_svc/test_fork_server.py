"""Workers as copies: what may come before the service has looked."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import uvloop

from tests.unit.tokenizer_svc.test_pool import SETUP
from tokenizer_svc.workers.fork_server import ForkServer
from tokenizer_svc.workers.worker import ORDINARY

READY_FRAME = bytes(4)
LIMIT_S = 30.0


def test_a_worker_that_is_ready_before_anybody_looks() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def copy() -> None:
        """The process that workers are copies of, and a worker that needs no time."""
        _, handles, _, _ = socket.recv_fds(theirs, 1, 1)
        with socket.socket(fileno=handles[0]) as worker:
            worker.sendall(READY_FRAME)
            theirs.sendall(os.getpid().to_bytes(4, "little"))
            assert worker.recv(1) == b""

    async def start() -> None:
        worker = await ForkServer(SETUP)._copy(ours, ORDINARY)
        try:
            await asyncio.wait_for(worker.ready(), LIMIT_S)
        finally:
            # Not `kill`: the number is this process's.
            worker._transport.abort()

    thread = threading.Thread(target=copy)
    thread.start()
    with ours, theirs:
        uvloop.run(start())
        thread.join()
