"""Whoever goes away, everything that was held for them comes back: blocks, runner state, stream slot."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, raw, running_stack

pytestmark = pytest.mark.e2e

# Whoever stays is served for far longer than a test waits for anything.
STEP_S = 0.2
NUM_TOKENS = 1000
assert NUM_TOKENS * STEP_S > 2 * LIMIT_S
NUM_REQUESTS = 6
# Of a tenant that may have as many streams as a test opens, and not one more.
KEY = "mr-counted"
COUNTED = f"""
[tenants.counted]
max_concurrent_streams = {NUM_REQUESTS}
[[keys.entries]]
id = "counted-1"
tenant = "counted"
hash = "sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
"""
BODY = {
    "messages": [{"role": "user", "content": "Go on and on."}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": f"{STEP_S * 1000:.0f}"}
    folder = tmp_path_factory.mktemp("slow")
    with running_stack(folder, "--simulated", config=CONFIG + COUNTED, environment=environment) as stack:
        yield stack


def http_streams(stack: Stack) -> Callable[[], None]:
    connections = []
    for _ in range(NUM_REQUESTS):
        connection = http.client.HTTPConnection(stack.address, timeout=LIMIT_S)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
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
        *("--header", f"authorization: Bearer {KEY}"),
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
    request.sampling.max_tokens = NUM_TOKENS
    request.sampling.ignore_eos = True
    return request


def grpc_streams(stack: Stack, timeout_s: float | None = None) -> Callable[[], None]:
    channel = stack.channel()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    calls = [
        stub.Chat(chat_request(stack), metadata=stack.metadata(KEY), timeout=timeout_s)
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
    "grpc deadline": lambda stack: grpc_streams(stack, timeout_s=5.0),
}


def short(stack: Stack) -> int:
    """Status of one more request of the tenant, which ends at once."""
    body = {"model": stack.model, **BODY, "max_tokens": 1, "stream": False}
    return raw(stack, "/v1/chat/completions", json.dumps(body).encode(), KEY).status_code


def num_active(stack: Stack) -> float:
    """Requests that the gateway holds."""
    (address,) = stack.addresses("gateway", "metrics")
    exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
    lines = [line for line in exposed if line.startswith("millrace_active_requests{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("kind", STREAMS)
def test_everything_is_released(slow: Stack, kind: str) -> None:
    leave = STREAMS[kind](slow)
    assert eventually(lambda: slow.invariants()[0].num_requests == NUM_REQUESTS), slow.invariants()
    held = slow.invariants()[0]
    # What is counted below was really held: blocks, runner states, every slot of the limit.
    assert held.num_total_blocks - held.num_unreferenced_blocks >= NUM_REQUESTS
    assert held.num_runner_states >= NUM_REQUESTS
    assert short(slow) == 429
    assert num_active(slow) == NUM_REQUESTS
    leave()
    # Once the engine hears of it, by its next step: that is counted without a clock in the scheduler's tests.
    slow.assert_nothing_leaked()
    assert eventually(lambda: num_active(slow) == 0)
    again = http_streams(slow)
    assert short(slow) == 429, "not more slots came back than there were"
    again()
    slow.assert_nothing_leaked()


def test_stop_string_releases_too(slow: Stack) -> None:
    body = {"model": slow.model, **BODY, "stream": False, "stop": ["e", "a", "i", "o", "u"]}
    responses = [raw(slow, "/v1/chat/completions", json.dumps(body).encode(), KEY) for _ in range(2)]
    assert {response.json()["choices"][0]["finish_reason"] for response in responses} == {"stop"}
    slow.assert_nothing_leaked()
    assert eventually(lambda: num_active(slow) == 0)
    leave = http_streams(slow)
    leave()
    assert eventually(lambda: short(slow) == 200)
    slow.assert_nothing_leaked()
