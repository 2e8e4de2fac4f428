"""Files and results encrypted, in a folder and in object storage, over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.batches.objects import BucketStorage
from gateway.config import ObjectStorageConfig
from runtime.errors import ConfigError
from tests.unit.gateway.batches.object_store import BUCKET, ObjectServer, object_server
from tests.unit.gateway.batches.serving import (
    call,
    create,
    ended,
    jsonl,
    ledger_rows,
    ok,
    request,
    results,
    serving,
    until,
    upload,
)
from tests.unit.gateway.rig.engine import ScriptedEngine

KEY = "a key of the deployment that is long enough"
_MIB = 1 << 20


@pytest.fixture
def bucket() -> Iterator[ObjectServer]:
    pytest.importorskip("obstore")
    with object_server() as server:
        yield server


def opened(server: ObjectServer, **more: str) -> BucketStorage:
    return BucketStorage(ObjectStorageConfig(**server.settings(**more)))


def nothing() -> None:
    """A beat."""


async def test_encrypted_nothing_of_a_batch_is_plain_on_the_disk(tmp_path: Path) -> None:
    engine = ScriptedEngine(step_s=0.01)
    async with serving(tmp_path, engine, key=KEY, max_in_flight=2) as stack:
        lines = [request(f"name-{each}", "a secret prompt") for each in range(30)]
        data = jsonl(*lines, b"{no json and a secret")
        file = (await upload(stack, data)).json()
        assert file["bytes"] == len(data)
        assert (await call(stack, "GET", f"files/{file['id']}/content")).content == data
        batch = await create(stack, data, metadata={"job": "a secret job"})

        async def some() -> bool:
            return bool((await ok(stack, "GET", f"batches/{batch['id']}"))["request_counts"]["completed"] > 5)

        await until(some)
        _assert_sealed(tmp_path / "batches")
    # Another gateway goes on.
    async with serving(tmp_path, key=KEY) as stack:
        batch = await ended(stack, batch)
        assert batch["metadata"] == {"job": "a secret job"}
        assert batch["request_counts"] == {"total": 31, "completed": 30, "failed": 1}
        found = await results(stack, batch["output_file_id"])
        output = await ok(stack, "GET", f"files/{batch['output_file_id']}")
        content = await call(stack, "GET", f"files/{batch['output_file_id']}/content")
        assert output["bytes"] == len(content.content)
        assert len(await results(stack, batch["error_file_id"])) == 1
        _assert_sealed(tmp_path / "batches")
    assert sorted(each["custom_id"] for each in found) == sorted(each["custom_id"] for each in lines)
    assert len(ledger_rows(tmp_path)) == 30


def _assert_sealed(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("batches.sqlite-shm"):
            data = path.read_bytes()
            for word in (b"secret", b"name-", b"hello", b"custom_id"):
                assert word not in data, path


async def test_a_key_may_come_later_and_one_that_is_missing_holds_up_what_needs_it(tmp_path: Path) -> None:
    lines = jsonl(*(request(str(each)) for each in range(4)))
    async with serving(tmp_path) as stack:
        plain = (await upload(stack, lines)).json()["id"]
    async with serving(tmp_path, key=KEY) as stack:
        assert (await call(stack, "GET", f"files/{plain}/content")).content == lines
        asked = {"input_file_id": plain, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await ended(stack, await ok(stack, "POST", "batches", json=asked))
        assert len(await results(stack, batch["output_file_id"])) == 4
        sealed = (await upload(stack, lines)).json()["id"]
    async with serving(tmp_path) as stack:
        lost = await call(stack, "GET", f"files/{sealed}/content")
        assert (lost.status_code, lost.json()["error"]["reason"]) == (500, "INTERNAL")
        waiting = await ok(stack, "POST", "batches", json={**asked, "input_file_id": sealed})

        async def told() -> Any:
            return (await ok(stack, "GET", f"batches/{waiting['id']}"))["status_detail"]

        assert "cannot be read" in await until(told)
    async with serving(tmp_path, key=KEY) as stack:
        batch = await ended(stack, waiting)
        assert (batch["status"], len(await results(stack, batch["output_file_id"]))) == ("completed", 4)


async def test_a_batch_whose_key_is_gone_holds_up_no_other(tmp_path: Path) -> None:
    engine = ScriptedEngine(step_s=0.01)
    async with serving(tmp_path, engine, key=KEY, max_in_flight=1) as stack:
        lost = await create(stack, jsonl(*(request(str(each)) for each in range(50))))
    async with serving(tmp_path) as stack:
        batch = await ended(stack, await create(stack, jsonl(request("a"))))
        assert batch["status"] == "completed"
        assert (await call(stack, "GET", f"batches/{lost['id']}")).status_code == 500


async def test_a_short_key_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.batches\.key: .* at least 32 characters"):
        async with serving(tmp_path, key="short"):
            pass


@pytest.mark.parametrize("key", ["", KEY])
async def test_batches_run_on_object_storage(tmp_path: Path, bucket: ObjectServer, key: str) -> None:
    async with serving(tmp_path, key=key, s3=bucket.settings(prefix="millrace/night")) as stack:
        lines = jsonl(*(request(str(each)) for each in range(20)), b"{no json")
        batch = await ended(stack, await create(stack, lines))
        assert batch["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
        found = await results(stack, batch["output_file_id"])
        assert sorted(int(each["custom_id"]) for each in found) == list(range(20))
        assert len(await results(stack, batch["error_file_id"])) == 1
        names = {batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]}
        assert set(bucket.objects) == {f"millrace/night/{each}" for each in names}
        assert not (tmp_path / "batches" / "files").exists()
        assert not list((tmp_path / "batches" / "work").iterdir())
        if key:
            assert not any(b"custom_id" in each for each in bucket.objects.values())
        await ok(stack, "DELETE", f"files/{batch['input_file_id']}")
        assert set(bucket.objects) == {
            f"millrace/night/{batch[name]}" for name in ("output_file_id", "error_file_id")
        }
        gone = await call(stack, "GET", f"files/{batch['input_file_id']}/content")
        assert gone.status_code == 404


async def test_storage_that_is_away_pauses_a_batch_and_refuses_uploads(
    tmp_path: Path, bucket: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.objects._RETRIES", 0)
    async with serving(tmp_path, s3=bucket.settings()) as stack:
        file = (await upload(stack, jsonl(request("a")))).json()
        bucket.fails = lambda method, path: 503
        refused = await upload(stack, b"x")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "STORE_UNAVAILABLE")
        assert "gateway.batches.s3" in refused.json()["error"]["message"]
        assert not list((tmp_path / "batches" / "uploads").iterdir())
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await ok(stack, "POST", "batches", json=asked)

        async def told() -> Any:
            return (await ok(stack, "GET", f"batches/{batch['id']}"))["status_detail"]

        assert "paused: the object storage of files" in await until(told)
        # What is deleted meanwhile is gone for its tenant, and from the storage when that is back.
        other = [name for name in bucket.objects if name != file["id"]]
        assert not other
        bucket.fails = lambda method, path: None
        batch = await ended(stack, batch)
        assert (batch["status"], batch["status_detail"]) == ("completed", None)
        bucket.fails = lambda method, path: 503
        assert (await ok(stack, "DELETE", f"files/{file['id']}"))["deleted"]
        assert (await call(stack, "GET", f"files/{file['id']}")).status_code == 404
        assert file["id"] in bucket.objects
        bucket.fails = lambda method, path: None
        assert stack.gateway._batches is not None
        assert stack.gateway._batches.sweep() == 1
        assert file["id"] not in bucket.objects


async def test_a_batch_that_waits_for_its_input_can_be_cancelled(
    tmp_path: Path, bucket: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.objects._RETRIES", 0)
    async with serving(tmp_path, s3=bucket.settings()) as stack:
        file = (await upload(stack, jsonl(request("a")))).json()
        bucket.fails = lambda method, path: 503
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await ok(stack, "POST", "batches", json=asked)

        async def told() -> Any:
            return (await ok(stack, "GET", f"batches/{batch['id']}"))["status_detail"]

        await until(told)
        await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        batch = await ended(stack, batch)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("cancelled", "batch_cancelled")
    assert batch["cancelled_at"] is not None
    assert batch["cancelling_at"] is not None


async def test_input_that_is_gone_from_the_storage_fails_the_batch(
    tmp_path: Path, bucket: ObjectServer
) -> None:
    async with serving(tmp_path, s3=bucket.settings()) as stack:
        file = (await upload(stack, jsonl(request("a")))).json()
        bucket.objects.clear()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await ended(stack, await ok(stack, "POST", "batches", json=asked))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_input_file")


def test_large_files_go_in_parts_and_come_in_ranges(tmp_path: Path, bucket: ObjectServer) -> None:
    storage, data = opened(bucket), bytes(range(256)) * (80 * 1024) + b"end"
    (tmp_path / "source").write_bytes(data)
    beats: list[int] = []
    storage.publish("large", tmp_path / "source", lambda: beats.append(1))
    assert bucket.objects["large"] == data
    assert not bucket.uploads
    assert [size for method, path, size in bucket.seen if "partNumber" in path and method == "PUT"] == [
        8 * _MIB,
        8 * _MIB,
        4 * _MIB + 3,
    ]
    assert len(beats) == 3
    assert [len(each) for each in storage.pieces("large")] == [8 * _MIB, 8 * _MIB, 4 * _MIB + 3]
    path = storage.fetch("large", tmp_path, nothing)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    storage.delete("large")
    storage.delete("large")
    assert not bucket.objects
    with pytest.raises(FileNotFoundError):
        storage.pieces("large")


def test_whoever_ends_an_upload_is_told_his_own_reason_and_nothing_is_seen_of_it(
    tmp_path: Path, bucket: ObjectServer
) -> None:
    (tmp_path / "source").write_bytes(bytes(20 * _MIB))

    def ending() -> None:
        raise InterruptedError("the gateway drains")

    with pytest.raises(InterruptedError, match="drains"):
        opened(bucket).publish("large", tmp_path / "source", ending)
    assert not bucket.objects


def test_a_file_that_changes_while_it_is_read_is_not_mixed(tmp_path: Path, bucket: ObjectServer) -> None:
    storage = opened(bucket)
    bucket.objects["a"] = bytes(9 * _MIB)
    pieces = storage.pieces("a")
    next(pieces)
    bucket.objects["a"] = b"x" * (9 * _MIB)
    with pytest.raises(MillraceError) as raised:
        next(pieces)
    assert raised.value.reason is Reason.STORE_UNAVAILABLE


@pytest.mark.parametrize("more", [{"bucket": "another"}, {"secret_access_key": "wrong"}])
def test_a_bucket_that_is_not_there_or_refuses_is_no_missing_file(
    tmp_path: Path, bucket: ObjectServer, more: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "source").write_bytes(b"x")
    storage = opened(bucket, **more)
    for act in (
        lambda: storage.publish("a", tmp_path / "source", nothing),
        lambda: next(storage.pieces("a")),
    ):
        with pytest.raises(MillraceError) as raised:
            act()
        assert raised.value.reason is Reason.STORE_UNAVAILABLE
    assert f"s3://{more.get('bucket', BUCKET)}" in caplog.text
    assert "wJalr" not in caplog.text


async def test_without_the_client_the_configuration_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"gateway\.batches\.s3\.bucket: .*pip install 'millrace\[s3\]'"):
        async with serving(tmp_path, s3={"bucket": "b"}):
            pass
    # Nothing is imported where no bucket is named.
    async with serving(tmp_path) as stack:
        assert (await upload(stack, b"x")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"access_key_id": "a"}, "access_key_id"),
        ({"secret_access_key": "b"}, "access_key_id"),
        ({"credentials_file": "/nowhere"}, "credentials_file"),
    ],
)
def test_half_credentials_are_refused(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.batches\.s3\.{key}"):
        ObjectStorageConfig(bucket="b", **settings).credentials()


def test_credentials_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("id-1\nsecret-1\n")
    config = ObjectStorageConfig(bucket="b", credentials_file=str(tmp_path / "credentials"))
    assert config.credentials() == {"access_key_id": "id-1", "secret_access_key": "secret-1"}
