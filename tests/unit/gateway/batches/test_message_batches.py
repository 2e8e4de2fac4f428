"""Anthropic's message batches, over the same machinery."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.batches.serving import call, ledger_rows, ok, serving, until


def asked(name: str, **more: Any) -> dict[str, Any]:
    params = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], **more}
    return {"custom_id": name, "params": params}


async def test_a_message_batch_from_its_creation_to_its_deletion(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        requests = [asked("a"), asked("b", stream=False), asked("c", model="gpt-9"), asked("d", stream=True)]
        batch = await ok(stack, "POST", "messages/batches", json={"requests": requests})
        assert (batch["type"], batch["processing_status"]) == ("message_batch", "in_progress")
        assert batch["request_counts"]["processing"] == 4
        assert batch["id"].startswith("msgbatch_")
        path = f"messages/batches/{batch['id']}"

        async def over() -> Any:
            now = await ok(stack, "GET", path)
            return now if now["processing_status"] == "ended" else None

        batch = await until(over)
        assert batch["request_counts"] == {
            "processing": 0,
            "succeeded": 2,
            "errored": 2,
            "canceled": 0,
            "expired": 0,
        }
        url = str(batch["results_url"])
        assert url.endswith(f"/v1/{path}/results")
        written = await call(stack, "GET", f"{path}/results")
        found = {each["custom_id"]: each["result"] for each in map(json.loads, written.text.splitlines())}
        assert {name: each["type"] for name, each in found.items()} == {
            "a": "succeeded",
            "b": "succeeded",
            "c": "errored",
            "d": "errored",
        }
        assert found["a"]["message"]["content"][0]["text"] == "hello 0"
        assert found["c"]["error"]["error"]["type"] == "not_found_error"
        streamed = found["d"]["error"]["error"]
        assert streamed["details"]["field"] == "params.stream"
        assert streamed["message"].startswith("params.stream: ")
        page = await ok(stack, "GET", "messages/batches")
        assert [each["id"] for each in page["data"]] == [batch["id"]]
        # They are no files, and no batches, of the other API.
        assert (await ok(stack, "GET", "files"))["data"] == []
        assert (await ok(stack, "GET", "batches"))["data"] == []
        unseen = await call(stack, "GET", path, tenant="other")
        assert unseen.status_code == 404
        # By the id that the client knows.
        assert f"'{batch['id']}'" in unseen.json()["error"]["message"]
        gone = await ok(stack, "DELETE", path)
        assert gone == {"id": batch["id"], "type": "message_batch_deleted"}
        missing = await call(stack, "GET", path)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert not list((tmp_path / "batches" / "files").iterdir())
    assert len(ledger_rows(tmp_path)) == 2


async def test_pages_go_both_ways(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        for _ in range(3):
            await ok(stack, "POST", "messages/batches", json={"requests": [asked("a")]})
        whole = [each["id"] for each in (await ok(stack, "GET", "messages/batches"))["data"]]
        later = await ok(stack, "GET", f"messages/batches?after_id={whole[0]}")
        assert [each["id"] for each in later["data"]] == whole[1:]
        earlier = await ok(stack, "GET", f"messages/batches?before_id={whole[2]}")
        assert [each["id"] for each in earlier["data"]] == whole[:2]


async def test_what_the_sdk_calls_a_beta_is_the_same(tmp_path: Path) -> None:
    # `client.beta.messages.batches` has it in the query of every path.
    async with serving(tmp_path) as stack:
        made = await ok(stack, "POST", "messages/batches?beta=true", json={"requests": [asked("a")]})
        path = f"messages/batches/{made['id']}"
        page = await ok(stack, "GET", "messages/batches?limit=1&beta=true")
        assert [each["id"] for each in page["data"]] == [made["id"]]

        async def over() -> Any:
            return (await ok(stack, "GET", f"{path}?beta=true"))["processing_status"] == "ended"

        await until(over)
        assert (await call(stack, "GET", f"{path}/results?beta=true")).status_code == 200
        assert (await ok(stack, "POST", f"{path}/cancel?beta=true"))["processing_status"] == "ended"
        await ok(stack, "DELETE", f"{path}?beta=true")
        strange = await call(stack, "GET", "messages/batches?alpha=true")
        assert (strange.status_code, strange.json()["error"]["details"]["field"]) == (400, "alpha")


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([], "requests"),
        ([asked("a"), asked("a")], "requests[1].custom_id"),
        ([asked("")], "requests[0].custom_id"),
        ([{"custom_id": "a", "params": []}], "requests[0].params"),
    ],
)
async def test_a_request_is_refused_by_its_field(tmp_path: Path, requests: list[Any], field: str) -> None:
    async with serving(tmp_path) as stack:
        refused = await call(stack, "POST", "messages/batches", json={"requests": requests})
    assert (refused.status_code, refused.json()["error"]["details"]["field"]) == (400, field)
