"""Whoever goes away, everything that was held for them comes back: blocks, runner state, stream slot."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.stack import CONCURRENT_KEY, LIMIT_S, Stack, eventually, raw, running_stack

pytestmark = pytest.mark.e2e

# A step is so long that a release within it cannot be mistaken for one that comes later.
STEP_S = 0.5
NUM_REQUESTS = 6
BODY = {
    "messages": [{"role": "user", "content": "Go on and on."}],
    "max_tokens": 1000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": f"{STEP_S * 1000:.0f}"}
    with running_stack(tmp_path_factory.mktemp("slow"), "--simulated", environment=environment) as stack:
        yield stack


def http_streams(stack: Stack) -> Callable[[], None]:
    connections = []
    for _ in range(NUM_REQUESTS):
        connection = http.client.HTTPConnection(stack.address, timeout=LIMIT_S)
        headers = {"authorization": f"Bearer {stack.state.api_key}", "content-type": "application/json"}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({"model": stack.model, **BODY}), headers
        )
        connection.getresponse().readline()
        connections.append(connection)

    def leave() -> None:
        for connection in connections:
            connection.sock.close() if connection.sock else None
            connection.close()

    return leave


def http2_streams(stack: Stack) -> Callable[[], None]:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("HTTP/2 needs curl, which is not here")
    command = [
        *(curl, "--silent", "--no-buffer", "--http2-prior-knowledge", f"{stack.url}/v1/chat/completions"),
        *("--header", f"authorization: Bearer {stack.state.api_key}"),
        *("--header", "content-type: application/json"),
        *("--data", json.dumps({"model": stack.model, **BODY})),
    ]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(NUM_REQUESTS)]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: ")

    def leave() -> None:
        for client in clients:
            client.kill()
            client.communicate()

    return leave


def chat_request(stack: Stack) -> inference_pb2.ChatRequest:
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Go on and on.")
    request = inference_pb2.ChatRequest(
        model=stack.model, conversation=chat_pb2.Conversation(messages=[message])
    )
    request.sampling.max_tokens = 1000
    request.sampling.ignore_eos = True
    return request


def grpc_streams(stack: Stack, timeout_s: float | None = None) -> Callable[[], None]:
    channel = stack.channel()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    calls = [
        stub.Chat(chat_request(stack), metadata=stack.metadata(), timeout=timeout_s)
        for _ in range(NUM_REQUESTS)
    ]
    for call in calls:
        next(call)

    def leave() -> None:
        if timeout_s is None:
            for call in calls:
                call.cancel()
        else:
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    for _ in call:
                        pass
                assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        channel.close()

    return leave


STREAMS: dict[str, Callable[[Stack], Callable[[], None]]] = {
    "http/1.1 disconnects": http_streams,
    "http/2 disconnects": http2_streams,
    "grpc call cancelled": grpc_streams,
    "grpc deadline": lambda stack: grpc_streams(stack, timeout_s=10 * STEP_S),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_everything_is_released(slow: Stack, kind: str) -> None:
    leave = STREAMS[kind](slow)
    assert eventually(lambda: slow.invariants()[0].num_requests == NUM_REQUESTS), slow.invariants()
    leave()
    left_s = time.monotonic()
    assert eventually(lambda: slow.invariants()[0].num_requests == 0)
    steps = (time.monotonic() - left_s) / STEP_S
    # Two steps are the most that one which had begun and one that was planned can take.
    assert steps < 3, f"{kind}: released after {steps:.1f} steps"
    slow.assert_nothing_leaked()


def test_stop_string_releases_too(slow: Stack) -> None:
    body = {"model": slow.model, **BODY, "stream": False, "stop": ["e", "a", "i", "o", "u"]}
    response = raw(slow, "/v1/chat/completions", json.dumps(body).encode())
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    slow.assert_nothing_leaked()


def test_stream_slot_comes_back(slow: Stack) -> None:
    body = json.dumps({"model": slow.model, **BODY})
    headers = {"authorization": f"Bearer {CONCURRENT_KEY}", "content-type": "application/json"}
    connection = http.client.HTTPConnection(slow.address, timeout=LIMIT_S)
    connection.request("POST", "/v1/chat/completions", body, headers)
    assert connection.getresponse().readline()
    short = json.dumps({"model": slow.model, **BODY, "max_tokens": 1, "stream": False}).encode()
    assert raw(slow, "/v1/chat/completions", short, CONCURRENT_KEY).status_code == 429
    connection.close()
    assert eventually(lambda: raw(slow, "/v1/chat/completions", short, CONCURRENT_KEY).status_code == 200)
    slow.assert_nothing_leaked()
