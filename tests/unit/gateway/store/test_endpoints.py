"""What is kept of the Responses API, over HTTP, by one gateway and by two on one database."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from contract.errors import Reason
from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, written
from tests.unit.gateway.store.test_store import KEY, postgres_url

__all__ = ["postgres_url"]

TEXT = "<think>Let me see what there is.</think>It is four, and it was four yesterday; it will be four. " * 2
numbers = iter(range(10**6))


def engine(text: str = TEXT, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(reply=lambda submit, choice: [*written(text), END_ID], **options)


@asynccontextmanager
async def serving(folder: Path, *engines: ScriptedEngine, **store: Any) -> AsyncIterator[Deployment]:
    gateway = store.pop("gateway", {})
    dies = any(each.dies_after_tokens >= 0 for each in engines)
    tables = {
        "tenants": {"other": {}},
        "gateway": {
            "store": {
                "tenants": ["*"],
                "url": f"sqlite:///{folder / 'store.sqlite'}",
                "key": KEY,
                "lease_s": 0.5,
                **store,
            },
            **({"routing": {"max_continuations": 0}} if dies else {}),
            "drain_limit_s": 0.05,
            **gateway,
            "ledger": {"url": f"sqlite:///{folder / 'ledger.sqlite'}", "flush_interval_s": 0.01},
        },
    }
    async with deployed(*(engines or (engine(),)), tables=tables) as stack:
        yield stack


async def send(
    stack: Deployment, method: str, path: str, *, tenant: str = "acme", **body: Any
) -> httpx.Response:
    header = signed_context(f"request-{next(numbers)}", tenant=tenant)
    return await stack.http.request(
        method,
        f"/v1/{path}",
        headers={CONTEXT_HEADER: header},
        json=body if method == "POST" else None,
        timeout=30,
    )


async def create(stack: Deployment, text: Any = "hi", **body: Any) -> dict[str, Any]:
    response = await send(stack, "POST", "responses", model="tiny", input=text, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def get(stack: Deployment, path: str) -> dict[str, Any]:
    response = await send(stack, "GET", path)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def until(seen: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await seen():
            await asyncio.sleep(0.01)


def prompt(stack: Deployment) -> list[str]:
    return [each.content for each in stack.tokenizer.prepared[-1].conversation.messages]


async def test_answer_is_kept_continued_and_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("It is 4.")) as stack:
        first = await create(stack, "2+2?", instructions="Be brief.")
        assert first["store"] is True
        assert await get(stack, f"responses/{first['id']}") == first
        second = await create(stack, "Sure?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        # Instructions are of one turn.
        assert prompt(stack) == ["2+2?", "It is 4.", "Sure?"]
        events = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            input="x",
            stream=True,
            previous_response_id=second["id"],
        )
        assert events.text.rstrip().endswith("[DONE]")
        last = json.loads(events.text.rstrip().split("\n\n")[-2].split("data: ")[1])["response"]
        assert await get(stack, f"responses/{last['id']}") == last
        assert len(prompt(stack)) == 5
        items = await get(stack, f"responses/{second['id']}/input_items?limit=1&order=asc")
        assert [each["content"][0]["text"] for each in items["data"]] == ["Sure?"]
        await create(stack, previous_response_id=first["id"])
        again = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            input=[{"type": "item_reference", "id": items["data"][0]["id"]}],
        )
        assert again.status_code == 200, again.text
        assert prompt(stack) == ["Sure?"]
        gone = await send(stack, "DELETE", f"responses/{first['id']}")
        assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
        words = set()
        for path in (f"responses/{first['id']}", "responses/resp_never"):
            missing = await send(stack, "GET", path)
            assert missing.status_code == 404
            words.add(missing.text.replace(path.removeprefix("responses/"), "?"))
        other = await send(stack, "GET", f"responses/{second['id']}", tenant="other")
        words.add(other.text.replace(second["id"], "?"))
        assert len(words) == 1
        # The second turn cannot be understood without the first.
        for previous in (first["id"], second["id"], "resp_never"):
            missing = await send(
                stack, "POST", "responses", model="tiny", input="x", previous_response_id=previous
            )
            assert missing.status_code == 404, missing.text
            assert missing.json()["error"]["reason"] == Reason.STORED_NOT_FOUND


async def test_conversation_takes_what_is_said_in_it(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("It is 4.")) as stack:
        greeting = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
        made = await send(stack, "POST", "conversations", items=[greeting], metadata={"a": "b"})
        conversation = made.json()
        path = f"conversations/{conversation['id']}"
        assert conversation == {**conversation, "object": "conversation", "metadata": {"a": "b"}}
        assert await get(stack, path) == conversation
        told = await create(stack, "2+2?", conversation=conversation["id"])
        assert told["conversation"] == {"id": conversation["id"]}
        await create(stack, "Sure?", conversation={"id": conversation["id"]}, store=True)
        assert prompt(stack) == ["hello", "2+2?", "It is 4.", "Sure?"]
        page = await get(stack, f"{path}/items?limit=2")
        assert (page["has_more"], page["data"][0]["role"]) == (True, "assistant")
        added = await send(stack, "POST", f"{path}/items", items=[greeting])
        item = added.json()["data"][0]
        assert await get(stack, f"{path}/items/{item['id']}") == item
        assert (await send(stack, "DELETE", f"{path}/items/{item['id']}")).json() == conversation
        assert (await send(stack, "GET", f"{path}/items/{item['id']}")).status_code == 404
        changed = await send(stack, "POST", path, metadata={"c": "d"})
        assert changed.json() == {**conversation, "metadata": {"c": "d"}}
        for body, field in (
            (
                {"conversation": conversation["id"], "previous_response_id": told["id"]},
                "previous_response_id",
            ),
            ({"conversation": conversation["id"], "store": False}, "store"),
        ):
            refused = await send(stack, "POST", "responses", model="tiny", input="x", **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        wrong = await send(
            stack, "POST", f"{path}/items", items=[{"role": "user", "content": [{"type": "x"}]}]
        )
        assert wrong.json()["error"]["param"] == "items[0].content[0].type"
        assert (await send(stack, "DELETE", path)).json()["deleted"] is True
        assert (await send(stack, "GET", path)).status_code == 404
        lost = await send(
            stack, "POST", "responses", model="tiny", input="x", conversation=conversation["id"]
        )
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "conversation")
        unknown = await send(
            stack, "POST", "responses", model="tiny", input=[{"type": "item_reference", "id": "msg_0"}]
        )
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "input[0].id")
        assert "kept by tenant and for a limited time" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("responses/x?stream=1", "stream"),
        ("responses/x?starting_after=3", "starting_after"),
        ("responses/x?frob=3", "frob"),
        ("responses/x/input_items?limit=0", "limit"),
        ("responses/x/input_items?limit=101", "limit"),
        ("responses/x/input_items?order=up", "order"),
        ("conversations/x/items?limit=many", "limit"),
    ],
)
async def test_wrong_query_is_refused_by_name(tmp_path: Path, path: str, param: str) -> None:
    async with serving(tmp_path) as stack:
        refused = await send(stack, "GET", path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await send(stack, "PUT", "responses/x")).status_code == 405
        assert (await send(stack, "GET", "responses/x/y")).status_code == 404


async def test_without_the_operators_leave_nothing_is_kept_and_that_is_said(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("4"), tenants=["other"]) as stack:
        told = await create(stack)
        assert told["store"] is False
        assert (await send(stack, "GET", f"responses/{told['id']}")).status_code == 404
        for body, field in (
            ({"background": True}, "background"),
            ({"background": True, "store": True}, "background"),
            ({"previous_response_id": told["id"]}, "previous_response_id"),
            ({"conversation": "conv_x"}, "conversation"),
        ):
            refused = await send(stack, "POST", "responses", model="tiny", input="x", **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert "gateway.store.tenants" in refused.json()["error"]["message"]
        assert (await send(stack, "POST", "conversations")).status_code == 400


async def test_lost_database_costs_no_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("4")) as stack:
        store = stack.gateway._store
        assert store is not None
        with store._database.writing() as connection:
            connection.exec_driver_sql("DROP TABLE store_items")
        told = await create(stack)
        assert (told["status"], told["store"]) == ("completed", False)
        lost = await send(stack, "GET", f"responses/{told['id']}/input_items")
        assert lost.status_code in (404, 503)


async def undisturbed(folder: Path, **body: Any) -> tuple[str, str]:
    """The id and the events of a background response that nothing happens to."""
    async with serving(folder) as stack:
        made = await create(stack, background=True, **body)
        streamed = await send(stack, "GET", f"responses/{made['id']}?stream=true")
        return made["id"], streamed.text


def same(events: str, id_: str, other: str) -> str:
    return events.replace(other.removeprefix("resp_"), id_.removeprefix("resp_"))


def without_clock(events: str) -> list[Any]:
    found = []
    for block in events.strip().split("\n\n"):
        data = block.split("data: ")[1]
        event = json.loads(data) if data != "[DONE]" else data
        if isinstance(event, dict) and "response" in event:
            event["response"]["created_at"] = 0
            event["response"]["completed_at"] = 0
            # Counted by an engine's messages.
            (event["response"]["usage"] or {}).pop("output_tokens_details", None)
        found.append(event)
    return found


@pytest.mark.parametrize(("per_step", "database"), [(1, "sqlite"), (7, "sqlite"), (7, "postgresql")])
async def test_background_goes_on_when_its_gateway_is_gone(
    tmp_path: Path, per_step: int, database: str, request: pytest.FixtureRequest
) -> None:
    shared = {"url": request.getfixturevalue("postgres_url")} if database == "postgresql" else {}
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    given = [{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}]
    other_id, expected = await undisturbed(tmp_path / "alone", text=given)
    # It answers half, and waits.
    slow = engine(step_s=0.005)
    async with serving(tmp_path / "two", slow, **shared) as first:
        made = await create(first, given, background=True)
        assert (made["status"], made["background"], made["store"]) == ("in_progress", True, True)
        path = f"responses/{made['id']}"
        store = first.gateway._store
        assert store is not None

        async def half_written() -> bool:
            events, _ = await store.call(store.background.events, "acme", made["id"], -1)
            return len(events) > 6

        await until(half_written)
        slow.gate.clear()
        # As a kill leaves it: nothing is said, nothing is released.
        background = first.gateway._background
        assert background is not None
        store.background.release = lambda work: None  # type: ignore[method-assign]
        await background.close()
        before, over = await store.call(store.background.events, "acme", made["id"], -1)
        assert not over
        async with serving(tmp_path / "two", engine(tokens_per_step=per_step), **shared) as second:
            streamed = await send(second, "GET", f"{path}?stream=true")
            # What was told before the kill is what is told now.
            assert streamed.text.startswith(b"".join(before).decode())
            assert without_clock(same(streamed.text, made["id"], made["id"])) == without_clock(
                same(expected, made["id"], other_id)
            )
            for after in (0, 5, len(before) - 1):
                resumed = await send(second, "GET", f"{path}?stream=true&starting_after={after}")
                assert resumed.text == "\n\n".join(streamed.text.split("\n\n")[after + 1 :])
            told = await get(second, path)
            assert told["status"] == "completed"
            assert "".join(part["text"] for part in told["output"][-1]["content"])
            assert told == await get(first, path)


async def test_background_of_a_gateway_that_drains_goes_on_elsewhere(tmp_path: Path) -> None:
    slow = engine(step_s=0.01)
    # Nobody waits for a lease to run out.
    async with serving(tmp_path, slow, lease_s=60.0) as first:
        made = await create(first, background=True)
        await first.gateway.drain()
        assert first.gateway.num_open == 0
    async with serving(tmp_path, lease_s=60.0) as second:
        streamed = await send(second, "GET", f"responses/{made['id']}?stream=true")
        assert "response.completed" in streamed.text
        told = await get(second, f"responses/{made['id']}")
        assert (told["status"], told["created_at"]) == ("completed", made["created_at"])


async def test_background_is_cancelled_from_another_gateway(tmp_path: Path) -> None:
    slow = engine(step_s=0.01)
    async with serving(tmp_path, slow) as first, serving(tmp_path) as second:
        made = await create(first, background=True)
        path = f"responses/{made['id']}"

        async def running() -> bool:
            return bool(slow.num_running)

        await until(running)
        early = await send(
            second, "POST", "responses", model="tiny", input="x", previous_response_id=made["id"]
        )
        assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
        cancelled = await send(second, "POST", f"{path}/cancel")
        assert cancelled.json()["status"] == "cancelled"

        async def ended() -> bool:
            return bool(slow.cancels)

        await until(ended)
        assert (await get(first, path))["status"] == "cancelled"
        assert (await send(second, "POST", f"{path}/cancel")).json()["status"] == "cancelled"
        assert "[DONE]" in (await send(first, "GET", f"{path}?stream=true")).text
        whole = await create(first, store=True)
        refused = await send(first, "POST", f"responses/{whole['id']}/cancel")
        assert refused.status_code == 400
        refused = await send(first, "GET", f"responses/{whole['id']}?stream=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


async def test_background_is_in_its_conversation_and_in_the_ledger(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("It is 4.")) as stack:
        conversation = (await send(stack, "POST", "conversations")).json()["id"]
        streamed = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            input="2+2?",
            background=True,
            stream=True,
            conversation=conversation,
        )
        assert "response.completed" in streamed.text
        await create(stack, "Sure?", conversation=conversation)
        assert prompt(stack) == ["2+2?", "It is 4.", "Sure?"]
        await asyncio.to_thread(stack.gateway._edge.deferred.flush)

        async def written() -> bool:
            database = open_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
            with database.connect() as connection:
                rows = connection.execute(select(REQUESTS.c.outcome, REQUESTS.c.completion_tokens)).all()
            database.dispose()
            return [tuple(row) for row in rows] == [("stop", 9), ("stop", 9)]

        await until(written)


async def test_background_that_fails_says_why(tmp_path: Path) -> None:
    # What an engine has sent when it dies may be lost with it, so it waits until something has been told.
    dying = engine("all that was said " * 9, dies_after_tokens=80, pauses_at_tokens=40)
    async with serving(tmp_path, dying) as stack:
        made = await create(stack, background=True)
        path, headers = f"/v1/responses/{made['id']}?stream=true", {CONTEXT_HEADER: signed_context("reader")}
        lines = []
        async with stack.http.stream("GET", path, headers=headers, timeout=30) as streamed:
            async for line in streamed.aiter_lines():
                lines.append(line)
                if line == "event: response.output_text.delta":
                    dying.gate.set()
        assert "event: response.failed" in lines
        told = await get(stack, f"responses/{made['id']}")
        assert told["status"] == "failed"
        assert told["error"]["code"] == "engine_lost"
        # What was told of it stays, as a stream without a store tells it.
        events = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
        assert text
        assert [each["status"] for each in told["output"]] == ["incomplete"]
        assert told["output"][0]["content"][0]["text"] == text
        assert events[-3]["item"] == told["output"][0]
        assert events[-1]["response"] == told


async def test_an_item_of_no_type_is_refused_for_its_type(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        for path, body, field in (
            ("conversations", {"items": [{}]}, "items[0].type"),
            ("responses", {"model": "tiny", "input": [{"foo": 1}]}, "input[0].type"),
            ("conversations", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].id"),
        ):
            refused = await send(stack, "POST", path, **body)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == field
            assert "not stored" not in refused.json()["error"]["message"]


async def test_where_to_go_on_is_for_streams_alone_and_the_document_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        refused = (await send(stack, "GET", "responses/resp_0?starting_after=0")).json()["error"]
        beyond = (await get(stack, "responses/openapi.json"))["x-beyond-schema"]
    rules = [each["rule"] for each in beyond if re.match(each.get("param", "^$"), refused["param"])]
    assert rules == ["stream is true"]
