"""What clients may do to the port, and other stacks to its place, without harm to anybody."""

from __future__ import annotations

import socket
import threading

import pytest

from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.stack import LIMIT_S, Stack, run_up
from tests.e2e.streaming import NUM_TOKENS, stream_tokens


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512],
)
def test_garbage_on_the_port_harms_nobody(simulated: Stack, garbage: bytes) -> None:
    host, _, port = simulated.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(garbage)
        while connection.recv(4096):
            pass
    assert stream_tokens(simulated, threading.Event()) == (NUM_TOKENS, "length")


def test_client_that_vanishes_in_mid_request_harms_nobody(simulated: Stack) -> None:
    host, _, port = simulated.address.rpartition(":")
    for _ in range(10):
        connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"authorization: Bearer mr-dev-local\r\ncontent-type: application/json\r\n\r\n{"
        )
        connection.close()
    assert stream_tokens(simulated, threading.Event()) == (NUM_TOKENS, "length")
    simulated.assert_nothing_leaked()


def test_second_stack_in_the_same_place_is_refused(simulated: Stack) -> None:
    result = run_up(simulated.directory, "--port", "0", "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert "already runs" in result.stdout + result.stderr
    assert simulated.openai().models.list().data
