"""Stored responses and conversations, in SQLite and in a real PostgreSQL where one is installed."""

from __future__ import annotations

import json
import sqlite3
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

from contract.errors import MillraceError, Reason
from gateway.config import StoreConfig
from gateway.store import tables
from gateway.store.background import LeaseLost
from gateway.store.database import StoreDatabase, StoredItem
from gateway.store.responses import NewResponse
from gateway.store.seal import RowSeal, SealBroken
from gateway.store.store import Store, storing
from runtime.errors import ConfigError
from tests.unit.gateway.ledger.conftest import postgres_url

__all__ = ["postgres_url"]

KEY = "a key of the deployment, of enough characters"
TENANT = "acme"
MARKER = "zebra-crossing-marker"


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def opened(url: str, clock: Clock, *, max_bytes: int = 1 << 30, keys: tuple[str, ...] = (KEY,)) -> Store:
    database = StoreDatabase(
        tables.open_store(url), RowSeal(keys), retention_s=3600, max_bytes=max_bytes, clock=clock
    )
    return Store(StoreConfig(tenants=("*",), lease_s=10), database)


def emptied(store: Store) -> Store:
    with store._database.writing() as connection:
        for table in tables._METADATA.tables.values():
            connection.execute(delete(table))
    return store


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.sqlite'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    store = emptied(opened(url, clock))
    yield store
    store._database.engine.dispose()


def item(id_: str, text: str = "hello") -> StoredItem:
    return StoredItem(id_, json.dumps({"id": id_, "type": "message", "content": text}).encode())


def response(name: str, *, previous: str = "", text: str = "hello", **fields: Any) -> NewResponse:
    return NewResponse(
        id=f"resp_{name}",
        resource={
            "id": f"resp_{name}",
            "status": fields.pop("status", "completed"),
            "output": [{"id": f"msg_{name}", "type": "message", "content": f"{text} back"}],
            "store": True,
        },
        inputs=[item(f"in_{name}", text)],
        previous_id=previous,
        **fields,
    )


def ended(resource: dict[str, Any], events: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """What becomes of a response that is cancelled."""
    output = [{"id": resource["id"].replace("resp", "msg"), "content": b"".join(events).decode()}]
    return {**resource, "status": "cancelled", "output": output}, [b"the end"]


def used(store: Store, tenant: str = TENANT) -> int:
    with store._database.engine.connect() as connection:
        query = select(tables.USED.c.num_bytes).where(tables.USED.c.tenant == tenant)
        return connection.scalar(query) or 0


def reason(error: pytest.ExceptionInfo[MillraceError]) -> Reason:
    return error.value.reason


def test_response_comes_back_as_it_was(store: Store) -> None:
    new = response("a")
    store.responses.put(TENANT, new)
    found = json.loads(tables_json(store.responses.get(TENANT, "resp_a")))
    assert found == new.resource
    assert list(found) == list(new.resource)
    items, more = store.responses.input_items(TENANT, "resp_a", limit=1, order="asc")
    assert ([each.id for each in items], more) == (["in_a"], False)


def tables_json(resource: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.json.encode(resource)


def test_ids_of_other_tenants_say_what_ids_that_never_were_say(store: Store, clock: Clock) -> None:
    store.responses.put(TENANT, response("a"))
    store.conversations.create(TENANT, {"id": "conv_a", "metadata": {}}, [item("msg_c")])
    for other in ("evil", "acm", "acme/", "ACME", ""):
        for number in range(50):
            assert store.find_items(other, ["in_a", "msg_a", "msg_c"]) == {}
            for call in (
                lambda id_: store.responses.get(other, id_),  # noqa: B023
                lambda id_: store.responses.delete(other, id_),  # noqa: B023
                lambda id_: store.background.cancel(other, id_, ended),  # noqa: B023
                lambda id_: store.responses.history(other, id_, max_bytes=10**6),  # noqa: B023
                lambda id_: store.conversations.get(other, id_),  # noqa: B023
                lambda id_: store.conversations.append(other, id_, [item("x")]),  # noqa: B023
                lambda id_: store.conversations.delete(other, id_),  # noqa: B023
            )[number % 7 : number % 7 + 1]:
                for is_conversation in (False, True):
                    told = []
                    for id_ in ("conv_a" if is_conversation else "resp_a", "resp_b"):
                        with pytest.raises(MillraceError) as refused:
                            call(id_)
                        told.append((reason(refused), refused.value.message.replace(id_, "?")))
                    assert told[0] == told[1]
                    assert told[0][0] is Reason.STORED_NOT_FOUND
    assert store.responses.get(TENANT, "resp_a")["id"] == "resp_a"
    # Nor do those that were deleted, or have expired.
    store.responses.put(TENANT, response("gone"))
    store.responses.delete(TENANT, "resp_gone")
    clock.now_s += 3600
    words = set()
    for id_ in ("resp_a", "resp_gone", "resp_none"):
        with pytest.raises(MillraceError) as refused:
            store.responses.get(TENANT, id_)
        words.add(refused.value.message.replace(id_, "?"))
    assert len(words) == 1


def test_history_is_a_chain_and_a_lost_link_is_told(store: Store, clock: Clock) -> None:
    for name, previous in (("a", ""), ("b", "resp_a"), ("c", "resp_b"), ("fork", "resp_a")):
        store.responses.put(TENANT, response(name, previous=previous))
    found = store.responses.history(TENANT, "resp_c", max_bytes=10**6)
    assert [each.id for each in found.items] == ["in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c"]
    assert not found.is_cut
    cut = store.responses.history(TENANT, "resp_c", max_bytes=1)
    assert ([each.id for each in cut.items], cut.is_cut) == (["in_c", "msg_c"], True)
    # What is continued is kept for as long again.
    clock.now_s += 3000
    store.responses.history(TENANT, "resp_c", max_bytes=10**6)
    clock.now_s += 3000
    store.sweep()
    assert len(store.responses.history(TENANT, "resp_c", max_bytes=10**6).items) == 6
    with pytest.raises(MillraceError):
        store.responses.get(TENANT, "resp_fork")
    store.responses.delete(TENANT, "resp_b")
    with pytest.raises(MillraceError) as refused:
        store.responses.history(TENANT, "resp_c", max_bytes=10**6)
    assert reason(refused) is Reason.STORED_NOT_FOUND
    assert "resp_b" in refused.value.message


def test_conversation_items_in_pages(store: Store) -> None:
    store.conversations.create(TENANT, {"id": "conv_a", "metadata": {}}, [item(f"i{n}") for n in range(5)])
    store.responses.put(TENANT, response("a", conversation_id="conv_a"))
    pages = []
    for order in ("asc", "desc"):
        after, more = "", True
        while more:
            page, more = store.conversations.items(TENANT, "conv_a", limit=2, order=order, after=after)
            after = page[-1].id
            pages.append([each.id for each in page])
    assert pages[:4] == [["i0", "i1"], ["i2", "i3"], ["i4", "in_a"], ["msg_a"]]
    assert pages[4:] == [["msg_a", "in_a"], ["i4", "i3"], ["i2", "i1"], ["i0"]]
    store.conversations.delete_item(TENANT, "conv_a", "i1")
    with pytest.raises(MillraceError):
        store.conversations.item(TENANT, "conv_a", "i1")
    assert store.conversations.item(TENANT, "conv_a", "i2") == item("i2")
    assert store.conversations.update(TENANT, "conv_a", {"k": "v"})["metadata"] == {"k": "v"}
    assert store.conversations.get(TENANT, "conv_a")["metadata"] == {"k": "v"}
    store.conversations.delete(TENANT, "conv_a")
    # The response has items of its own.
    assert set(store.find_items(TENANT, ["i0", "in_a", "msg_a"])) == {"in_a", "msg_a"}
    store.responses.delete(TENANT, "resp_a")
    assert used(store) == 0


def test_what_was_not_used_for_longest_makes_room(url: str, clock: Clock) -> None:
    store = emptied(opened(url, clock, max_bytes=20_000))
    for number in range(20):
        clock.now_s += 1
        store.responses.put(TENANT, response(str(number), text="x" * 2000))
        assert used(store) <= 20_000
    with pytest.raises(MillraceError):
        store.responses.get(TENANT, "resp_0")
    store.responses.get(TENANT, "resp_19")
    # Of another tenant nothing goes, and conversations stay.
    store.responses.put("other", response("x", text="x" * 2000))
    store.conversations.create(TENANT, {"id": "conv_a"}, [item("i0", "x" * 12_000)])
    with pytest.raises(MillraceError) as refused:
        store.conversations.append(TENANT, "conv_a", [item("i1", "x" * 12_000)])
    assert reason(refused) is Reason.STORE_FULL
    assert len(store.conversations.items(TENANT, "conv_a", limit=9, order="asc")[0]) == 1
    store.responses.get("other", "resp_x")
    store._database.engine.dispose()


def test_background_has_one_writer_and_ends_at_a_cancellation(url: str, clock: Clock) -> None:
    first, second = emptied(opened(url, clock)), opened(url, clock)
    mine, others = first.background, second.background
    new = response("a", status="queued")
    new.resource["output"] = []
    work = mine.create(TENANT, new, b"what to compute")
    mine.add(work, 0, [b"e0", b"e1"])
    mine.add(work, 2, [b"e2"])
    assert others.events(TENANT, "resp_a", 0) == ([b"e1", b"e2"], False)
    assert others.take_over(9) == []
    clock.now_s += 11
    (taken,) = others.take_over(9)
    assert (taken.body, taken.num_events, taken.last_event, taken.num_owners) == (
        b"what to compute",
        3,
        b"e2",
        2,
    )
    with pytest.raises(LeaseLost):
        mine.add(work, 3, [b"e3 of the wrong one"])
    assert first.background.take_over(9) == []
    # Nor has a gateway two: one that comes back to its own after a while does not write as it did before.
    clock.now_s += 11
    (again,) = others.take_over(9)
    with pytest.raises(LeaseLost):
        others.add(taken, 3, [b"e3 of the same one before"])
    taken = again
    done = {**new.resource, "status": "completed", "output": [{"id": "msg_a", "content": "x"}]}
    others.finish(taken, done, 3, [b"e3"])
    assert mine.events(TENANT, "resp_a", -1) == ([b"e0", b"e1", b"e2", b"e3"], True)
    assert json.loads(tables_json(first.responses.get(TENANT, "resp_a"))) == done
    assert first.background.cancel(TENANT, "resp_a", ended)["status"] == "completed"

    new = response("b", status="queued")
    new.resource["output"] = []
    work = mine.create(TENANT, new, b"")
    # A gateway that leaves does not keep others waiting.
    mine.release(work)
    (taken,) = others.take_over(9)
    assert taken.num_owners == 1
    others.add(taken, 0, [b"e0", b"e1"])
    cancelled = mine.cancel(TENANT, "resp_b", ended)
    assert cancelled == json.loads(tables_json(first.responses.get(TENANT, "resp_b")))
    assert (cancelled["status"], cancelled["output"]) == ("cancelled", [{"id": "msg_b", "content": "e0e1"}])
    assert mine.events(TENANT, "resp_b", -1) == ([b"e0", b"e1", b"the end"], True)
    with pytest.raises(LeaseLost):
        others.add(taken, 2, [b"too late"])
    first.responses.put(TENANT, response("c"))
    with pytest.raises(MillraceError) as refused:
        mine.cancel(TENANT, "resp_c", ended)
    assert reason(refused) is Reason.INVALID_ARGUMENT
    for name in "abc":
        first.responses.delete(TENANT, f"resp_{name}")
    assert used(first) == 0
    for each in (first, second):
        each._database.engine.dispose()


def left(store: Store, *names: str) -> str:
    """Those of the responses that are there."""
    found = ""
    for name in names:
        with suppress(MillraceError):
            found += store.responses.get(TENANT, f"resp_{name}")["id"].removeprefix("resp_")
    return found


def test_what_was_not_used_for_longest_goes_first(url: str, clock: Clock) -> None:
    store = emptied(opened(url, clock))
    for name in "abc":
        store.responses.put(TENANT, response(name))
        clock.now_s += 1
    size = used(store) // 3
    store.responses.history(TENANT, "resp_a", max_bytes=10**6)
    store._database.max_bytes = 4 * size
    there = []
    for name in "def":
        clock.now_s += 1
        store.responses.put(TENANT, response(name))
        there.append(left(store, *"abcdef"))
    assert there == ["abcd", "acde", "adef"]
    assert used(store) == 4 * size
    store._database.engine.dispose()


def test_no_response_goes_before_what_continues_it(url: str, clock: Clock) -> None:
    store = emptied(opened(url, clock))
    for name, previous in (("a", ""), ("b", "resp_a"), ("x", ""), ("c", "resp_b")):
        clock.now_s += 100
        store.responses.history(TENANT, previous, max_bytes=10**6) if previous else None
        store.responses.put(TENANT, response(name, previous=previous))
    size = used(store) // 4
    store._database.max_bytes = 4 * size + size // 2
    there = []
    for name in "defg":
        clock.now_s += 100
        store.responses.put(TENANT, response(name))
        there.append(left(store, *"abcxdefg"))
    # x was used before the chain was for the last time, whose first turns go last.
    assert there == ["abcd", "abde", "adef", "defg"]
    # What a response continues stays for as long as it comes.
    store._database.max_bytes = 2 * size
    store.responses.put(TENANT, response("h", previous="resp_g"))
    assert left(store, *"defgh") == "gh"
    with pytest.raises(MillraceError) as refused:
        store.responses.put(TENANT, response("i", previous="resp_h"))
    assert reason(refused) is Reason.STORE_FULL
    assert left(store, *"ghi") == "gh"
    store._database.engine.dispose()


def test_writers_of_one_tenant_do_not_wait_for_each_other_in_a_circle(url: str, clock: Clock) -> None:
    store = emptied(opened(url, clock))
    store.conversations.create(TENANT, {"id": "conv_a", "metadata": {}}, [])
    begin = threading.Barrier(4)

    def write(number: int) -> None:
        begin.wait()
        for turn in range(40):
            name = f"{number}_{turn}"
            match number:
                case 0:
                    store.conversations.append(TENANT, "conv_a", [item(f"i_{name}")])
                case 1:
                    store.responses.put(TENANT, response(name, conversation_id="conv_a"))
                case 2:
                    store.conversations.update(TENANT, "conv_a", {"turn": name})
                case _:
                    store.sweep()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    items, more = store.conversations.items(TENANT, "conv_a", limit=1000, order="asc")
    assert (len(items), more) == (3 * 40, False)
    store.conversations.delete(TENANT, "conv_a")
    for turn in range(40):
        store.responses.delete(TENANT, f"resp_1_{turn}")
    assert used(store) == 0
    store._database.engine.dispose()


def test_deleted_bytes_are_in_no_file(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "store.sqlite"
    store = opened(f"sqlite:///{path}", clock)
    for number in range(50):
        store.responses.put(TENANT, response(str(number), text=MARKER * 40))
    store.conversations.create(TENANT, {"id": "conv_a", "metadata": {}}, [item("i0", MARKER * 500)])
    with sqlite3.connect(path) as plain:
        sealed = [
            row[0]
            for row in plain.execute(
                "SELECT body FROM store_items UNION ALL SELECT body FROM store_responses"
            )
        ]
    plain.close()
    there = all_bytes(tmp_path)
    assert MARKER.encode() not in there
    # Overflow pages cut long ones.
    heads = [each[:64] for each in sealed]
    assert all(each in there for each in heads)
    for number in range(25):
        store.responses.delete(TENANT, f"resp_{number}")
    clock.now_s += 3600
    assert store.sweep() == 26
    left = all_bytes(tmp_path)
    assert not any(each in left for each in heads)
    assert not any(each[-64:] in left for each in sealed)
    store._database.engine.dispose()


def all_bytes(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.iterdir())


def test_ten_thousand_turns_are_read_in_bounded_memory(tmp_path: Path, clock: Clock) -> None:
    store = opened(f"sqlite:///{tmp_path / 'store.sqlite'}", clock)
    store.conversations.create(TENANT, {"id": "conv_a", "metadata": {}}, [])
    for start in range(0, 20_000, 500):
        turns = [item(f"i{number}", "word " * 100) for number in range(start, start + 500)]
        store.conversations.append(TENANT, "conv_a", turns)
    with store._database.writing() as connection:
        for number in range(10_000):
            previous = f"resp_{number - 1}" if number else ""
            store.responses.insert(connection, TENANT, response(str(number), previous=previous))

    def peak(max_bytes: int) -> int:
        tracemalloc.start()
        items, is_cut = store.conversations.history(TENANT, "conv_a", max_bytes=max_bytes)
        chain = store.responses.history(TENANT, "resp_9999", max_bytes=max_bytes)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert is_cut
        assert chain.is_cut
        assert items[-1].id == "i19999"
        assert chain.items[-1].id == "msg_9999"
        assert sum(len(each.body) for each in items) <= max_bytes
        return memory

    peak(10_000)
    # Of 10 MB.
    assert peak(100_000) < 2_000_000
    store._database.engine.dispose()


def test_rows_cannot_be_moved_and_keys_can_be_replaced(tmp_path: Path, clock: Clock) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    old = opened(url, clock)
    old.responses.put(TENANT, response("a"))
    old._database.engine.dispose()
    new = opened(url, clock, keys=("a new key of the deployment, long enough", KEY))
    assert new.responses.get(TENANT, "resp_a")["id"] == "resp_a"
    new.responses.put(TENANT, response("b"))
    with new._database.writing() as connection:
        connection.exec_driver_sql("UPDATE store_responses SET tenant = 'evil' WHERE id = 'resp_b'")
    with pytest.raises(SealBroken, match="altered"):
        new.responses.get("evil", "resp_b")
    new._database.engine.dispose()
    other = opened(url, clock, keys=("another key that has sealed nothing here",))
    with pytest.raises(SealBroken, match="key_file"):
        other.responses.get(TENANT, "resp_a")
    other._database.engine.dispose()


def test_work_that_no_key_opens_fails_and_holds_up_nothing(tmp_path: Path, clock: Clock) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    old, new = opened(url, clock), opened(url, clock, keys=("another key that has sealed nothing here",))
    old.background.create(TENANT, response("old", status="queued"), b"sealed with a key that is gone")
    new.background.create(TENANT, response("new", status="queued"), b"what to compute")
    clock.now_s += 11
    assert [work.response_id for work in new.background.take_over(9)] == ["resp_new"]
    clock.now_s += 11
    assert [work.num_owners for work in new.background.take_over(9)] == [3]
    for each in (old, new):
        each._database.engine.dispose()


def test_a_history_is_as_long_as_its_items(store: Store) -> None:
    previous = ""
    for name in "abcdef":
        new = response(name, previous=previous)
        new.resource["tools"] = ["x" * 20_000]
        store.responses.put(TENANT, new)
        previous = f"resp_{name}"
    history = store.responses.history(TENANT, previous, max_bytes=16_384)
    assert (len(history.items), history.is_cut) == (12, False)


def test_what_is_not_allowed_is_refused_by_name(tmp_path: Path) -> None:
    config = StoreConfig(tenants=("acme",), url=f"sqlite:///{tmp_path / 's.sqlite'}", key=KEY)
    store = Store.open(config)
    assert store is not None
    assert storing(store, "acme", asked=None, background=False) is store
    assert storing(store, "acme", asked=False, background=False) is None
    assert storing(store, "other", asked=None, background=False) is None
    assert storing(None, "acme", asked=False, background=False) is None
    for where, tenant in ((None, "acme"), (store, "other")):
        assert storing(where, tenant, asked=True, background=False) is None
        with pytest.raises(MillraceError) as refused:
            storing(where, tenant, asked=True, background=True)
        assert refused.value.field == "background"
        assert "gateway.store.tenants" in refused.value.message
    with pytest.raises(MillraceError) as refused:
        storing(store, "acme", asked=False, background=True)
    assert refused.value.field == "store"
    assert Store.open(StoreConfig()) is None
    with pytest.raises(ConfigError, match=r"gateway\.store\.key"):
        StoreConfig(key="short").secrets()
    store._database.engine.dispose()
