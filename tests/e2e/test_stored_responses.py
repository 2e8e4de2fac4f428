"""Responses and conversations that are kept, over the real stack: what is told again is what was told first,
whichever gateways live, and it is told to its tenant alone until it is deleted or has expired.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import msgspec
import pytest

from observability.emit.names import ACTIVE_STREAMS
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import LIMIT_S, Stack, eventually, limited_config, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

OTHER_KEY = "mr-other-of-stored"
CONFIG = f"""{limited_config("", 5.0, ["[tenants.other]"], {"other": OTHER_KEY})}
[gateway.store]
tenants = ["development", "other"]
key = "a key of this test that is long enough"
lease_s = 1.0
sweep_interval_s = 0.2
"""
# Numbers enough that a gateway can be killed while they are written, and as many in every run.
NUMBERS = {"type": "array", "items": {"enum": [111, 222]}, "minItems": 600, "maxItems": 600}
SCHEMA = {
    "type": "object",
    "properties": {"numbers": NUMBERS},
    "required": ["numbers"],
    "additionalProperties": False,
}
LONG = {
    "input": "Count.",
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": SCHEMA, "strict": True}},
    "max_output_tokens": 3900,
}
# Nobody can know it: what the database has of it is sealed.
SECRET = "Quokkas sleep in Nedlands"
# Tables of the database, and the column by which a row is a response's or conversation's.
TABLES = {
    "store_responses": "id",
    "store_conversations": "id",
    "store_items": "owner_id",
    "store_events": "response_id",
    "store_work": "response_id",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways on one database, and the bundled model."""
    folder = tmp_path_factory.mktemp("stored")
    with running_stack(folder, "--gateways", "2", config=CONFIG) as stack:
        yield stack
        stack.assert_nothing_leaked()


def send(stack: Stack, method: str, path: str, key: str = "", **body: Any) -> httpx.Response:
    return httpx.request(
        method,
        f"{stack.url}/v1/{path}",
        headers={"authorization": f"Bearer {key or stack.state.api_key}"},
        json=body if method == "POST" else None,
        timeout=LIMIT_S,
        trust_env=False,
    )


def told(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def create(stack: Stack, **body: Any) -> dict[str, Any]:
    given = {"model": stack.model, "max_output_tokens": 12, **body}
    return told(send(stack, "POST", "responses", **given))


def get(stack: Stack, path: str) -> dict[str, Any]:
    return told(send(stack, "GET", path))


def events_of(stack: Stack, id_: str, after: int = -1) -> bytes:
    """The stream as it is told now, to its end."""
    behind = f"&starting_after={after}" if after >= 0 else ""
    return send(stack, "GET", f"responses/{id_}?stream=true{behind}").content


def rows(stack: Stack, id_: str) -> int:
    """In all tables, of a response or conversation."""
    with closing(sqlite3.connect(stack.directory / "store.sqlite")) as store:
        return sum(
            store.execute(f"SELECT COUNT(*) FROM {table} WHERE {column} = ?", (id_,)).fetchone()[0]
            for table, column in TABLES.items()
        )


def test_turns_are_continued_listed_and_deleted(pair: Stack) -> None:
    first = create(pair, input=SECRET, store=True)
    assert first["store"] is True
    second = create(pair, input="And then?", previous_response_id=first["id"])
    # The prompt has grown by all that was said.
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    for made in (first, second):
        # Each of the two gateways tells the same.
        assert all(get(pair, f"responses/{made['id']}") == made for _ in range(4))
    (item,) = get(pair, f"responses/{first['id']}/input_items")["data"]
    assert item["content"][0]["text"] == SECRET
    files = [each.read_bytes() for each in pair.directory.glob("store.sqlite*")]
    assert files
    assert not any(SECRET.encode() in each for each in files)
    forgotten = create(pair, input="x", store=False)
    assert send(pair, "GET", f"responses/{forgotten['id']}").status_code == 404
    assert rows(pair, first["id"]) > 0
    assert told(send(pair, "DELETE", f"responses/{first['id']}"))["deleted"] is True
    assert rows(pair, first["id"]) == 0
    for missing in (
        send(pair, "GET", f"responses/{first['id']}"),
        send(pair, "DELETE", f"responses/{first['id']}"),
        # A turn that is gone is a hole in what continues it.
        send(pair, "POST", "responses", model=pair.model, input="x", previous_response_id=second["id"]),
    ):
        assert (missing.status_code, missing.json()["error"]["reason"]) == (404, "STORED_NOT_FOUND")


def test_a_conversation_takes_what_is_said_in_it(pair: Stack) -> None:
    greeting = {"role": "user", "content": [{"type": "input_text", "text": SECRET}]}
    made = told(send(pair, "POST", "conversations", items=[greeting], metadata={"topic": "animals"}))
    path = f"conversations/{made['id']}"
    told(send(pair, "POST", f"{path}/items", items=[{"role": "assistant", "content": "They do."}]))
    alone = create(pair, input="Where?", store=False)
    answer = create(pair, input="Where?", conversation=made["id"])
    assert answer["conversation"] == {"id": made["id"]}
    assert answer["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    items = get(pair, f"{path}/items?order=asc")["data"]
    assert [each.get("role") for each in items] == ["user", "assistant", "user", "assistant"]
    assert items[-1]["id"] == answer["output"][-1]["id"]
    assert items[-1]["content"][0]["text"] == answer["output"][-1]["content"][0]["text"]
    pages = [get(pair, f"{path}/items?order=asc&limit=3")]
    pages.append(get(pair, f"{path}/items?order=asc&limit=3&after={pages[0]['last_id']}"))
    assert [each["id"] for page in pages for each in page["data"]] == [each["id"] for each in items]
    assert [page["has_more"] for page in pages] == [True, False]
    told(send(pair, "DELETE", f"{path}/items/{items[0]['id']}"))
    assert [each["id"] for each in get(pair, f"{path}/items?order=asc")["data"]] == [
        each["id"] for each in items[1:]
    ]
    assert told(send(pair, "POST", path, metadata={"topic": "x"}))["metadata"] == {"topic": "x"}
    assert told(send(pair, "DELETE", path))["deleted"] is True
    assert rows(pair, made["id"]) == 0
    assert send(pair, "GET", path).status_code == 404
    # What was answered in it stays.
    assert get(pair, f"responses/{answer['id']}")["output"] == answer["output"]


def serving(stack: Stack) -> list[str]:
    """Gateways that something runs in."""
    gateways = [each.name for each in stack.state.processes if each.name.startswith("gateway")]
    readings = stack.metrics("gateway")
    return [name for name, found in zip(gateways, readings, strict=True) if found.value(ACTIVE_STREAMS)]


def lines_until(stack: Stack, id_: str, num_events: int) -> bytes:
    """The first events of a response that is computed."""
    read = b""
    with httpx.stream(
        "GET",
        f"{stack.url}/v1/responses/{id_}?stream=true",
        headers={"authorization": f"Bearer {stack.state.api_key}"},
        timeout=LIMIT_S,
        trust_env=False,
    ) as stream:
        for piece in stream.iter_raw():
            read += piece
            if read.count(b"\n\n") >= num_events:
                break
    return read[: read.rindex(b"\n\n") + 2]


def timeless(events: bytes, id_: str) -> bytes:
    """Events of two responses are the same but for their id and their clocks."""
    same = events.replace(id_.removeprefix("resp_").encode(), b"ID")
    return re.sub(rb'"(created_at|completed_at)":\d+', rb'"\1":0', same)


def test_a_background_response_outlives_its_gateway_event_by_event(pair: Stack) -> None:
    undisturbed = create(pair, **LONG, background=True, temperature=0)
    expected = events_of(pair, undisturbed["id"])
    assert b"event: response.completed\n" in expected
    made = create(pair, **LONG, background=True, temperature=0)
    assert (made["status"], made["background"], made["store"]) == ("in_progress", True, True)
    before = lines_until(pair, made["id"], 6)
    (victim,) = serving(pair)
    os.kill(pair.pid(victim), signal.SIGKILL)
    assert b"event: response.completed\n" not in before
    last = msgspec.json.decode(before.split(b"\n\n")[-2].partition(b"data: ")[2])["sequence_number"]
    rest = events_of(pair, made["id"], last)
    whole = events_of(pair, made["id"])
    assert before + rest == whole
    assert timeless(whole, made["id"]) == timeless(expected, undisturbed["id"])
    num_events = whole.count(b"\n\n")
    for after in (0, last + 1, num_events - 3):
        assert events_of(pair, made["id"], after) == b"\n\n".join(whole.split(b"\n\n")[after + 1 :])
    logs = [each.read_text() for each in (pair.directory / "logs").glob("gateway-*.log")]
    assert sum(f"response {made['id']} is taken over" in log for log in logs) == 1
    found = get(pair, f"responses/{made['id']}")
    assert found["status"] == "completed"
    assert len(msgspec.json.decode(found["output"][-1]["content"][0]["text"])["numbers"]) == 600
    assert eventually(lambda: f"{victim} is ready again" in pair.output.read_text()), pair.transcript()
    # The one that was killed tells the same.
    assert all(events_of(pair, made["id"]) == whole for _ in range(4))


def test_a_background_response_is_cancelled_and_tells_so(pair: Stack) -> None:
    made = create(pair, **LONG, background=True)
    before = lines_until(pair, made["id"], 4)
    gone = told(send(pair, "POST", f"responses/{made['id']}/cancel"))
    assert gone["status"] == "cancelled"
    whole = events_of(pair, made["id"])
    assert whole.startswith(before)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert get(pair, f"responses/{made['id']}") == gone
    assert eventually(lambda: not serving(pair))


def test_ids_of_another_tenant_say_what_ids_that_never_were_say(pair: Stack) -> None:
    response = create(pair, input="mine", background=True)
    assert b"[DONE]" in events_of(pair, response["id"])
    conversation = told(send(pair, "POST", "conversations", items=[{"role": "user", "content": "mine"}]))
    item = get(pair, f"conversations/{conversation['id']}/items")["data"][0]
    mine = {"resp": response["id"], "conv": conversation["id"], "item": item["id"]}
    never = {name: re.sub(r"[0-9a-f]{4}$", "0000", id_) for name, id_ in mine.items()}

    def answers(ids: dict[str, str]) -> list[tuple[int, str]]:
        resp, conv = f"responses/{ids['resp']}", f"conversations/{ids['conv']}"
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", resp, {}),
            ("GET", f"{resp}?stream=true", {}),
            ("GET", f"{resp}?stream=true&starting_after=1", {}),
            ("GET", f"{resp}/input_items", {}),
            ("POST", f"{resp}/cancel", {}),
            ("DELETE", resp, {}),
            ("POST", "responses", {"previous_response_id": ids["resp"], "input": "x"}),
            ("POST", "responses", {"conversation": ids["conv"], "input": "x"}),
            ("POST", "responses", {"input": [{"type": "item_reference", "id": ids["item"]}]}),
            ("GET", conv, {}),
            ("POST", conv, {"metadata": {"a": "b"}}),
            ("GET", f"{conv}/items", {}),
            ("POST", f"{conv}/items", {"items": [{"role": "user", "content": "x"}]}),
            ("GET", f"{conv}/items/{ids['item']}", {}),
            ("DELETE", f"{conv}/items/{ids['item']}", {}),
            ("DELETE", conv, {}),
        ]
        found = []
        for method, path, body in asked:
            more = {"model": pair.model} if path == "responses" else {}
            answer = send(pair, method, path, OTHER_KEY, **body, **more)
            text = answer.text
            for id_ in ids.values():
                text = text.replace(id_, "?")
            found.append((answer.status_code, text))
        return found

    theirs = answers(mine)
    assert {status for status, _ in theirs} == {404}
    assert theirs == answers(never)
    # Nothing has come of it.
    assert get(pair, f"responses/{response['id']}")["status"] in ("completed", "incomplete")
    assert get(pair, f"conversations/{conversation['id']}") == conversation
    assert get(pair, f"conversations/{conversation['id']}/items")["data"] == [item]


def test_what_has_expired_is_gone_with_its_rows(pair: Stack) -> None:
    old, young = (create(pair, input=text) for text in ("old", "young"))
    conversation = told(send(pair, "POST", "conversations", items=[{"role": "user", "content": "old"}]))
    with closing(sqlite3.connect(pair.directory / "store.sqlite", timeout=LIMIT_S)) as store, store:
        # As if the month were over.
        for table, id_ in (("store_responses", old["id"]), ("store_conversations", conversation["id"])):
            changed = store.execute(f"UPDATE {table} SET expires_unix_ms = 1 WHERE id = ?", (id_,))
            assert changed.rowcount == 1
    for path in (f"responses/{old['id']}", f"conversations/{conversation['id']}"):
        assert send(pair, "GET", path).status_code == 404
    assert eventually(lambda: rows(pair, old["id"]) == rows(pair, conversation["id"]) == 0)
    assert get(pair, f"responses/{young['id']}") == young
