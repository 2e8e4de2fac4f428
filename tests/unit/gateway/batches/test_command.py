"""`millrace batch run` over a batch that does not come to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.auth.directory import hash_key
from services.cli.app import app
from services.cli.batch import BatchFailed, _endpoint_of
from tests.unit.gateway.batches.serving import call, ended, jsonl, ok, request, serving, until
from tests.unit.gateway.batches.test_batches import _after, _reached, _service
from tests.unit.gateway.rig.deployment import Deployment
from tests.unit.gateway.rig.engine import ScriptedEngine

KEYS = {"keys": {"entries": [{"id": "k1", "tenant": "acme", "hash": hash_key("mr-batch")}]}}
NUM_LINES = 6


@asynccontextmanager
async def running(
    folder: Path, file: Path, num_answered: int
) -> AsyncIterator[tuple[Deployment, Callable[[], asyncio.Task[Result]], dict[str, Any]]]:
    """A gateway, the command that runs a file there, and its batch, which stops after some answers."""
    engine = ScriptedEngine()
    async with serving(folder, engine, max_in_flight=1, tables=KEYS) as stack:
        gate = _after(engine, num_answered)

        def command() -> asyncio.Task[Result]:
            url = f"http://127.0.0.1:{stack.gateway.http.port}"
            asked = ["batch", "run", str(file), "--url", url]
            environment = {"MILLRACE_API_KEY": "mr-batch"}
            return asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, asked, env=environment))

        task = command()
        try:
            await until(lambda: _reached(engine, num_answered + 1))
            (batch,) = (await ok(stack, "GET", "batches"))["data"]
            yield stack, lambda: task if not task.done() else command(), batch
        finally:
            gate.set()
            await asyncio.wait([task])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_the_endpoint_is_that_of_the_first_line_that_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\nno json\n[1]\n{}\n" + jsonl(request("a")))
    assert _endpoint_of(path) == "/v1/chat/completions"
    path.write_bytes(b"")
    with pytest.raises(BatchFailed, match="name the endpoint with --endpoint"):
        _endpoint_of(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "night.jsonl"
    path.write_bytes(jsonl(*(request(str(each)) for each in range(NUM_LINES))))
    return path


@pytest.mark.parametrize(
    ("status", "why"), [("expired", "its window of 24h ended"), ("cancelled", "it was cancelled")]
)
async def test_a_batch_that_is_cut_short_is_fetched_and_told(
    tmp_path: Path, file: Path, status: str, why: str
) -> None:
    async with running(tmp_path, file, 2) as (stack, command, batch):
        if status == "expired":
            store = _service(stack).store
            now = store._clock
            store._clock = lambda: now() + 25 * 3600
            await ended(stack, batch)
            store._clock = now
        else:
            await ok(stack, "POST", f"batches/{batch['id']}/cancel")
            await asyncio.sleep(0)
            _service(stack)._runner._jobs[batch["id"]]._end_lines()
        result = await command()
    assert result.exit_code == 3, result.output
    assert f"{status}: 2 of {NUM_LINES} lines have answers; {why} before the others did" in result.output
    answered, errors = (read(file.with_name(f"{file.name}.{name}.jsonl")) for name in ("output", "errors"))
    assert [each["custom_id"] for each in answered] == ["0", "1"]
    assert {each["error"]["code"] for each in errors} == {f"batch_{status}"}
    assert [each["custom_id"] for each in answered + errors] == [str(each) for each in range(NUM_LINES)]
    # The same command begins anew.
    assert not file.with_name(f"{file.name}.batch").exists()


async def test_a_batch_that_is_gone_is_told_with_the_remedy(tmp_path: Path, file: Path) -> None:
    note = file.with_name(f"{file.name}.batch")
    async with running(tmp_path, file, 2) as (stack, command, batch):
        task = command()
        kept = note.read_bytes()
        await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        _service(stack)._runner._jobs[batch["id"]]._end_lines()
        assert (await task).exit_code == 3
        # A file of results that somebody has deleted keeps the other one from nobody.
        note.write_bytes(kept)
        output = (await ok(stack, "GET", f"batches/{batch['id']}"))["output_file_id"]
        assert (await call(stack, "DELETE", f"files/{output}")).status_code == 200
        errors = file.with_name(f"{file.name}.errors.jsonl")
        errors.unlink()
        result = await command()
        assert (result.exit_code, note.exists(), errors.exists()) == (2, False, True)
        assert "output: no such file" in result.output
        assert "the same command runs the file anew" in result.output
        note.write_bytes(kept)
        _service(stack).store.delete_batch("acme", "openai", batch["id"])
        result = await command()
        assert result.exit_code == 2
        assert f"delete {note} to begin anew" in result.output
