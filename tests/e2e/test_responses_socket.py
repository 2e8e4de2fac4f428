"""The WebSocket mode of the Responses API through Envoy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from observability.emit import names
from tests.e2e.stack import LIMIT_S, Stack, eventually, running_stack

pytestmark = pytest.mark.e2e

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
# Slow enough that a kill finds the answer running.
PACE = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    with running_stack(folder, "--simulated", "--engines", "2", environment=PACE) as stack:
        yield stack


def opened(stack: Stack, key: str | None = None) -> connect:
    return connect(
        f"ws://{stack.address}/v1/responses",
        additional_headers={"authorization": f"Bearer {key or stack.state.api_key}"},
        open_timeout=LIMIT_S,
    )


def send(socket: ClientConnection, stack: Stack, text: str = "Tell a story.", **event: Any) -> None:
    body = {"type": "response.create", "model": stack.model, "input": text, **event}
    socket.send(json.dumps(body))


def until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(json.loads(socket.recv(LIMIT_S)))
    return found


def said(events: list[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")


def test_an_answer_goes_on_when_its_engine_is_killed(engines: Stack) -> None:
    options = {"max_output_tokens": 100, "temperature": 0.8, "store": False}
    with opened(engines) as socket:
        send(socket, engines, **options)
        first = until_end(socket)[-1]["response"]
        send(socket, engines, "And then?", previous_response_id=first["id"], **options)
        begun = [json.loads(socket.recv(LIMIT_S)) for _ in range(8)]
        for index in range(2):
            # Whichever computes it: the other one goes on, and then the first.
            os.kill(engines.pid(f"engine-{index}"), signal.SIGKILL)
            back = f"engine-{index} is ready again"
            assert eventually(lambda back=back: back in engines.output.read_text()), engines.transcript()
        events = begun + until_end(socket)
        last = events[-1]["response"]
        # The connection has lost nothing.
        send(socket, engines, "The end.", previous_response_id=last["id"], **options)
        assert until_end(socket)[-1]["response"]["previous_response_id"] == last["id"]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert (last["status"], last["usage"]["output_tokens"]) == ("incomplete", 100)
    assert last["output"][-1]["content"][0]["text"] == said(events)
    engines.assert_nothing_leaked()


def test_each_turn_is_a_request_of_its_own_in_the_traces(engines: Stack) -> None:
    with opened(engines) as socket:
        ids = []
        for _ in range(2):
            send(socket, engines, max_output_tokens=3)
            ids.append(until_end(socket)[-1]["response"]["id"].removeprefix("resp_"))
    assert ids[0].rpartition("-")[::2] == (ids[1].rpartition("-")[0], "1")
    for id_ in ids:
        assert engines.trace(id_, [names.GATEWAY_REQUEST])


def test_a_client_that_vanishes_leaves_nothing_behind(engines: Stack) -> None:
    for _ in range(5):
        socket = opened(engines)
        with socket as connection:
            send(connection, engines, max_output_tokens=200)
            connection.recv(LIMIT_S)
            connection.socket.close()
    engines.assert_nothing_leaked()


def test_what_is_no_frame_and_what_is_too_large_harm_nobody(engines: Stack) -> None:
    with opened(engines) as other:
        with opened(engines) as socket:
            socket.socket.sendall(b"\xff" * 4096)
            with pytest.raises(ConnectionClosed):
                socket.recv(LIMIT_S)
        with opened(engines) as socket:
            # The client may hear of it in the middle of its message, or behind it.
            with suppress(ConnectionClosed):
                socket.send(["x" * 2**19] * 40)
            error = json.loads(socket.recv(LIMIT_S))
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(LIMIT_S)
        assert (error["status"], error["error"]["reason"]) == (413, "REQUEST_TOO_LARGE")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        send(other, engines, max_output_tokens=3)
        assert until_end(other)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(("path", "key", "status"), [("responses", "mr-nobody", 401), ("models", "", 400)])
def test_sockets_are_opened_at_their_path_with_a_key(
    engines: Stack, path: str, key: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {key or engines.state.api_key}"}
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://{engines.address}/v1/{path}", additional_headers=headers, open_timeout=LIMIT_S)
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body)["error"]["message"]


# Opens a WebSocket by extended CONNECT, says one thing, and prints the frames until the last event.
_OVER_HTTP2 = """
const http2 = require('http2');
const [, authority, key, text, method] = process.argv;
const session = http2.connect('http://' + authority);
session.on('remoteSettings', settings => {
  if (!settings.enableConnectProtocol) { console.log('no extended CONNECT'); process.exit(1); }
  const plain = {':method': 'CONNECT', ':authority': authority, authorization: 'Bearer ' + key};
  const extended = {...plain, ':protocol': method, ':path': '/v1/responses', ':scheme': 'http'};
  const stream = session.request(method ? {...extended, 'sec-websocket-version': '13'} : plain);
  stream.on('response', headers => {
    console.log(headers[':status']);
    if (headers[':status'] !== 200) { session.close(); return; }
    const data = Buffer.from(text), mask = Buffer.from([1, 2, 3, 4]), head = Buffer.alloc(4);
    head[0] = 0x81; head[1] = 0x80 | 126; head.writeUInt16BE(data.length, 2);
    stream.write(Buffer.concat([head, mask, data.map((byte, index) => byte ^ mask[index % 4])]));
  });
  let seen = '';
  stream.on('data', data => {
    seen += data.toString('latin1');
    if (/"type":"(response.(completed|incomplete|failed)|error)"/.test(seen)) {
      console.log(seen); session.destroy();
    }
  });
});
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node's client of HTTP/2")
@pytest.mark.parametrize(
    ("method", "key", "status"),
    [
        ("websocket", "", "200"),
        ("websocket", "mr-nobody", "401"),
        ("connect-udp", "", "404"),
        ("", "", "404"),
    ],
)
def test_sockets_alone_are_opened_over_http2(engines: Stack, method: str, key: str, status: str) -> None:
    body = {
        "type": "response.create",
        "model": engines.model,
        "input": "Hello! " * 20,
        "max_output_tokens": 5,
    }
    arguments = [engines.address, key or engines.state.api_key, json.dumps(body), method]
    said = subprocess.run(
        ["node", "-e", _OVER_HTTP2, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = said.stdout.splitlines()
    assert lines[:1] == [status], said.stdout + said.stderr
    assert ("response.incomplete" in said.stdout) == (status == "200")
    engines.assert_nothing_leaked()


async def test_the_sdk_talks_through_the_edge(engines: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{engines.url}/v1", api_key=engines.state.api_key)
    async with client.responses.connect() as connection:
        await connection.response.create(model=engines.model, input="Hello!", max_output_tokens=5)
        kinds = []
        async for event in connection:
            kinds.append(event.type)
            if event.type in ENDS:
                break
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
