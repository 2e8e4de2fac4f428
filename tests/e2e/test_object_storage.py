"""Files and batches of the real stack in a bucket of moto, a server of the S3 protocol made elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.supervisor.ports import free_ports
from tests.clients.environments import Client, Environments, NotInstalled, read_pins
from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, running_stack

MOTO = Client(name="moto", group="Operations", program="", pip=("moto[s3,server]==5.2.5",))
BUCKET, PREFIX = "files-of-ours", "millrace/night"
NUM_LINES = 200
_CONFIG = f"""{CONFIG}
[supervisor]
restart_delay_s = 0.2
[gateway.batches]
key = "a key of this test that is long enough"
lease_s = 1.0
max_in_flight = 8
[gateway.batches.s3]
bucket = "{BUCKET}"
prefix = "{PREFIX}"
endpoint = "URL"
region = "us-east-1"
access_key_id = "of-moto"
secret_access_key = "which takes any"
[engine.simulation]
step_ms = 4.0
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bucket's URL."""
    environments = Environments(Path("build/clients").resolve(), read_pins(), ())
    try:
        environments.make(MOTO)
    except NotInstalled as error:
        pytest.skip(f"moto cannot be installed: {str(error)[-300:]}")
    (port,) = free_ports(1, "127.0.0.1")
    python = environments.folder(MOTO) / "bin" / "python"
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("moto") / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=file, stderr=file
        )
        try:
            assert eventually(lambda: _made(f"{url}/{BUCKET}") or process.poll() is not None), log.read_text()
            assert process.poll() is None, log.read_text()
            yield f"{url}/{BUCKET}"
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def _made(bucket: str) -> bool:
    try:
        return httpx.put(bucket, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def stack(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    config = _CONFIG.replace("URL", bucket.removesuffix(f"/{BUCKET}"))
    folder = tmp_path_factory.mktemp("storage")
    with running_stack(folder, "--simulated", "--gateways", "2", config=config) as running:
        yield running
        running.assert_nothing_leaked()


def client_of(stack: Stack) -> openai.OpenAI:
    return stack.openai().with_options(max_retries=20)


def objects(bucket: str) -> dict[str, bytes]:
    """What lies in the bucket, by name."""
    page = httpx.get(bucket, params={"list-type": "2"}, trust_env=False).text
    return {
        name: httpx.get(f"{bucket}/{name}", trust_env=False).content
        for name in re.findall("<Key>(.*?)</Key>", page)
    }


def lines(stack: Stack) -> bytes:
    """Of a batch; one is none."""
    body = {"model": stack.model, "max_tokens": 12, "messages": [{"role": "user", "content": "Go on."}]}
    made = [
        json.dumps({"custom_id": str(each), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for each in range(NUM_LINES)
    ]
    return "\n".join([*made, "{no json"]).encode()


def test_a_batch_lies_in_the_bucket_whatever_is_killed(stack: Stack, bucket: str) -> None:
    client = client_of(stack)
    file = client.files.create(file=("lines.jsonl", lines(stack)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def done() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    for number, victim in enumerate(("gateway-0", "engine-0", "gateway-1"), start=1):
        target = number * NUM_LINES // 5
        assert eventually(lambda target=target: done() >= target), stack.transcript()  # type: ignore[misc]
        os.kill(stack.pid(victim), signal.SIGKILL)
    assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed"), stack.transcript()
    batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id
    assert batch.error_file_id
    found = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(each["custom_id"]) for each in found) == list(range(NUM_LINES))
    (wrong,) = client.files.content(batch.error_file_id).text.splitlines()
    assert str(NUM_LINES + 1) in wrong
    assert client.files.content(file.id).content == lines(stack)
    ids = (file.id, batch.output_file_id, batch.error_file_id)
    stored = objects(bucket)
    assert set(stored) == {f"{PREFIX}/{each}" for each in ids}
    # Each is sealed, and nothing but what is under way lies on the disk.
    assert not any(b"custom_id" in each for each in stored.values())
    assert not [each for id_ in ids for each in stack.directory.rglob(id_)]
    for id_ in ids:
        assert client.files.delete(id_).deleted
    assert not objects(bucket)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_a_file_in_parts_comes_back_as_it_was(stack: Stack, bucket: str) -> None:
    client, data = client_of(stack), os.urandom(20 << 20)
    file = client.files.create(file=("large.jsonl", data), purpose="batch")
    assert file.bytes == len(data)
    (stored,) = objects(bucket).values()
    assert len(stored) > len(data)
    assert client.files.content(file.id).content == data
    client.files.delete(file.id)
    assert not objects(bucket)
