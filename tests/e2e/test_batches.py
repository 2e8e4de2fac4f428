"""A batch through the real stack: whatever is killed on the way, every line is there once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import CONFIG, Stack, eventually, running_stack

NUM_LINES = 600
_CONFIG = f"""{CONFIG}
[supervisor]
restart_delay_s = 0.2
[gateway.batches]
lease_s = 1.0
max_in_flight = 8
[engine.simulation]
step_ms = 4.0
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("batches")
    with running_stack(folder, "--simulated", "--gateways", "2", config=_CONFIG) as running:
        yield running


def lines(stack: Stack, num: int) -> bytes:
    body = {"model": stack.model, "max_tokens": 12, "messages": [{"role": "user", "content": "Go on."}]}
    made = [
        {"custom_id": str(each), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for each in range(num)
    ]
    return b"".join(json.dumps(each).encode() + b"\n" for each in made)


def rows_of(stack: Stack, batch_id: str) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(stack.directory / "ledger.sqlite")) as ledger:
        query = "SELECT request_id, outcome FROM requests WHERE client_request_id = ?"
        return list(ledger.execute(query, (batch_id,)))


def test_gateways_engine_and_tokenizer_are_killed_and_every_line_is_there_once(stack: Stack) -> None:
    client = stack.openai().with_options(max_retries=20)
    file = client.files.create(file=("lines.jsonl", lines(stack, NUM_LINES)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def done() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    for number, victim in enumerate(("gateway-0", "engine-0", "gateway-1", "tokenizer"), start=1):
        target = number * NUM_LINES // 6
        assert eventually(lambda target=target: done() >= target), stack.transcript()  # type: ignore[misc]
        os.kill(stack.pid(victim), signal.SIGKILL)
    assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed"), stack.transcript()
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is None, client.files.content(batch.error_file_id or "").text[:2000]
    found = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(each["custom_id"]) for each in found) == list(range(NUM_LINES))
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in found} == {12}
    # The last of them are written within moments.
    assert eventually(lambda: len(rows_of(stack, batch.id)) == NUM_LINES)
    rows = rows_of(stack, batch.id)
    assert len({request_id for request_id, _ in rows}) == NUM_LINES
    assert {outcome for _, outcome in rows} <= {"length", "stop"}


def test_the_command_goes_on_where_it_was_interrupted(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "night.jsonl"
    path.write_bytes(lines(stack, 200))
    environment = {"MILLRACE_STATE_DIR": str(stack.directory), "PATH": os.environ["PATH"]}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    command = [sys.executable, "-m", "services.cli", "batch", "run", str(path)]
    note = tmp_path / "night.jsonl.batch"

    def millrace() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    first = millrace()
    assert eventually(note.exists)
    begun = json.loads(note.read_text())["batch_id"]
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=60)
    assert first.returncode in (0, 130), told
    if first.returncode == 130:
        assert b"the same command follows it again" in told
        again = millrace()
        _, told = again.communicate(timeout=60)
        assert again.returncode == 0, told
    written: list[Any] = [
        json.loads(each) for each in (tmp_path / "night.jsonl.output.jsonl").read_bytes().splitlines()
    ]
    assert sorted(int(each["custom_id"]) for each in written) == list(range(200))
    assert not note.exists()
    assert len(rows_of(stack, begun)) == 200
    path.write_text("no json\n")
    failed = millrace()
    _, told = failed.communicate(timeout=60)
    assert failed.returncode == 2
    assert b"lines is a JSON object with a url" in b" ".join(told.split())


def test_a_file_beyond_the_limit_of_bodies_goes_through_the_edge(stack: Stack) -> None:
    client, data = stack.openai(), b"x" * (20 << 20)
    file = client.files.create(file=("large.jsonl", data), purpose="batch")
    assert file.bytes == len(data)
    assert client.files.content(file.id).content == data
    client.files.delete(file.id)
