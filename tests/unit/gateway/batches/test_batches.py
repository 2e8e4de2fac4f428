"""Files and batches over HTTP: what is answered, what is refused, and what becomes of each line."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from millrace.common.v1 import context_pb2
from openai import AsyncOpenAI

from contract.errors import MillraceError, Reason
from tests.unit.gateway.batches.serving import (
    CHAT,
    ENDED,
    as_tenant,
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
from tests.unit.gateway.rig.deployment import Deployment
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode


async def test_the_sdk_runs_a_batch(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        made = AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none", default_headers=as_tenant())
        async with made as sdk:
            lines = jsonl(*(request(f"line-{each}") for each in range(5)))
            file = await sdk.files.create(
                file=("lines.jsonl", lines),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
            assert (file.bytes, file.filename, file.purpose) == (len(lines), "lines.jsonl", "batch")
            assert file.expires_at == file.created_at + 3600
            assert (await sdk.files.content(file.id)).content == lines
            batch = await sdk.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"job": "night"},
            )
            assert (batch.status, batch.metadata) == ("validating", {"job": "night"})
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = await sdk.batches.retrieve(batch.id)
            assert batch.status == "completed", batch
            assert batch.request_counts is not None
            assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
            assert batch.output_file_id is not None
            assert batch.error_file_id is None
            found = [
                json.loads(each) for each in (await sdk.files.content(batch.output_file_id)).text.splitlines()
            ]
            assert sorted(each["custom_id"] for each in found) == [f"line-{each}" for each in range(5)]
            answer = found[0]["response"]
            assert (answer["status_code"], answer["body"]["object"]) == (200, "chat.completion")
            assert answer["body"]["choices"][0]["message"]["content"] == "hello 0"
            assert [each.id async for each in sdk.batches.list()] == [batch.id]
            assert {each.id async for each in sdk.files.list()} == {file.id, batch.output_file_id}
            assert (await sdk.files.delete(file.id)).deleted
    rows = ledger_rows(tmp_path)
    assert len(rows) == len({row.request_id for row in rows}) == 5
    assert {(row.tier, row.outcome, row.client_request_id) for row in rows} == {
        ("standard", "stop", batch.id)
    }


async def test_bad_lines_become_lines_of_the_error_file(tmp_path: Path) -> None:
    async with serving(tmp_path, tables={"gateway": {"max_body_bytes": 4096}}) as stack:
        batch = await create(
            stack,
            jsonl(
                request("good"),
                b"{not json",
                request("elsewhere", url="/v1/completions"),
                request("good"),
                request("long", "x" * 5000),
                request("unknown", model="gpt-9"),
                request("streamed", stream=True),
                request("higher", service_tier="fast"),
                request("hot", temperature=9),
                request("lowest", service_tier="auto"),
            ),
        )
        batch = await ended(stack, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 10, "completed": 2, "failed": 8}
        good = await results(stack, batch["output_file_id"])
        assert {each["custom_id"] for each in good} == {"good", "lowest"}
        bad = await results(stack, batch["error_file_id"])
    told = {each["error"]["line"]: each for each in bad if each["error"]}
    assert {line: each["error"]["code"] for line, each in told.items()} == {
        2: "malformed_body",
        3: "invalid_value",
        4: "invalid_value",
        5: "request_too_large",
        7: "unsupported_parameter",
    }
    assert told[2]["custom_id"] is None
    assert "line 1" in told[4]["error"]["message"]
    assert "4096 bytes" in told[5]["error"]["message"]
    refused = {each["custom_id"]: each["response"] for each in bad if each["response"]}
    assert {name: each["status_code"] for name, each in refused.items()} == {
        "unknown": 404,
        "higher": 403,
        "hot": 400,
    }
    assert refused["hot"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"name,age\n"])
async def test_no_jsonl_fails_the_batch_by_its_line(tmp_path: Path, data: bytes) -> None:
    async with serving(tmp_path) as stack:
        batch = await ended(stack, await create(stack, data))
    assert batch["status"] == "failed"
    (problem,) = batch["errors"]["data"]
    assert problem["line"] == 1
    assert "line 1" in problem["message"]


async def test_other_endpoints_answer_as_they_do_over_http(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "tiny", "prompt": ["a", "b"]},
        "/v1/responses": {"model": "tiny", "input": "hi"},
        "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    }
    async with serving(tmp_path) as stack:
        for url, body in bodies.items():
            line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            batch = await ended(stack, await create(stack, jsonl(line), endpoint=url))
            (result,) = await results(stack, batch["output_file_id"])
            direct = await stack.http.post(url, json=body)
            assert result["response"]["body"].keys() == direct.json().keys()
    # A completion of two prompts is two requests.
    assert len({row.entry_id for row in ledger_rows(tmp_path)}) == 2 * (2 + 1 + 1)


async def test_what_is_another_tenants_is_told_as_what_never_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        batch = await ended(stack, await create(stack, jsonl(request("a"))))
        for path, known in (
            ("files/{}", batch["input_file_id"]),
            ("files/{}/content", batch["output_file_id"]),
            ("batches/{}", batch["id"]),
        ):
            words = set()
            for id_ in (known, "file-0"):
                gone = await call(stack, "GET", path.format(id_), tenant="other")
                assert gone.status_code == 404
                words.add(gone.text.replace(id_, "?"))
            assert len(words) == 1
        assert (await ok(stack, "GET", "files", tenant="other"))["data"] == []
        assert (await ok(stack, "GET", "batches", tenant="other"))["data"] == []
        asked = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        stolen = await call(stack, "POST", "batches", tenant="other", json=asked)
        assert (stolen.status_code, stolen.json()["error"]["param"]) == (404, "input_file_id")
        for method, path in (
            ("DELETE", f"files/{batch['input_file_id']}"),
            ("POST", f"batches/{batch['id']}/cancel"),
        ):
            assert (await call(stack, method, path, tenant="other")).status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": "x" * 600}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"frob": 1}, "frob"),
    ],
)
async def test_a_batch_is_refused_by_its_field(tmp_path: Path, body: dict[str, Any], field: str) -> None:
    async with serving(tmp_path) as stack:
        file = (await upload(stack, jsonl(request("a")))).json()
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **body}
        refused = await call(stack, "POST", "batches", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_files_are_bounded_and_say_by_what(tmp_path: Path) -> None:
    async with serving(tmp_path, max_file_bytes=100_000, max_bytes=150_000, max_files=3) as stack:
        large = await upload(stack, b"x" * 100_001)
        assert (large.status_code, large.json()["error"]["param"]) == (413, "file")
        assert "100000 bytes" in large.json()["error"]["message"]
        huge = await upload(stack, b"x" * 1_000_000)
        assert huge.status_code == 413
        assert (await upload(stack, b"x" * 100_000)).status_code == 200
        full = await upload(stack, b"x" * 60_000)
        assert (full.status_code, full.json()["error"]["reason"]) == (429, "STORE_FULL")
        assert "150000" in full.json()["error"]["message"]
        for _ in range(2):
            assert (await upload(stack, b"x")).status_code == 200
        assert "the limit is 3" in (await upload(stack, b"x")).json()["error"]["message"]
        # Another tenant has its own.
        assert (await upload(stack, b"x", tenant="other")).status_code == 200
        assert not list((tmp_path / "batches" / "uploads").iterdir())
        for fields, param in (
            ({"purpose": "assistants"}, "purpose"),
            ({"frob": "1"}, "frob"),
            ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ):
            refused = await upload(stack, b"x", **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        nameless = await call(
            stack, "POST", "files", files={"purpose": (None, b"batch"), "file": (None, b"x")}
        )
        assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "file")
        assert "with a file name" in nameless.json()["error"]["message"]
        bare = await call(stack, "POST", "files", content=b"x")
        assert (bare.status_code, bare.json()["error"]["reason"]) == (400, "MALFORMED_BODY")


async def test_pages_of_files_and_batches(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        made = [(await upload(stack, b"x")).json()["id"] for _ in range(5)]
        first = await ok(stack, "GET", "files?limit=2&order=asc")
        rest = await ok(stack, "GET", f"files?order=asc&after={first['last_id']}")
        assert first["has_more"]
        assert not rest["has_more"]
        assert sorted(each["id"] for each in first["data"] + rest["data"]) == sorted(made)
        assert (await ok(stack, "GET", "files?purpose=vision"))["data"] == []
        assert (await call(stack, "GET", "files?limit=0")).json()["error"]["param"] == "limit"
        assert (await call(stack, "GET", "batches?after=batch_0")).status_code == 404
        assert (await call(stack, "PUT", f"files/{made[0]}")).status_code == 405


async def test_cancelled_batch_keeps_what_was_answered_and_names_the_rest(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(tmp_path, engine, max_in_flight=1) as stack:
        gate = _after(engine, 3)
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(8))))
        await until(lambda: _reached(engine, 4))
        cancelling = await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        assert cancelling["status"] == "cancelling"
        in_use = await call(stack, "DELETE", f"files/{batch['input_file_id']}")
        assert in_use.status_code == 400
        gate.set()
        batch = await ended(stack, batch)
        assert batch["status"] == "cancelled"
        answered = await results(stack, batch["output_file_id"])
        rest = await results(stack, batch["error_file_id"])
        assert batch["request_counts"] == {"total": 8, "completed": 4, "failed": 0}
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    assert sorted(each["custom_id"] for each in answered + rest) == [str(each) for each in range(8)]


def _after(engine: ScriptedEngine, num: int) -> asyncio.Event:
    """Lets the engine go on beyond so many answers."""
    told = engine.reply

    def reply(submit: Any, choice: int) -> list[int]:
        if len(engine.submissions) > num:
            engine.gate.clear()
        return told(submit, choice)

    engine.reply = reply
    gate = asyncio.Event()

    async def open_gate() -> None:
        await gate.wait()
        engine.reply = told
        engine.gate.set()

    engine.telling = asyncio.create_task(open_gate())
    return gate


async def _running(engine: ScriptedEngine, num: int) -> bool:
    return engine.num_running >= num


async def _reached(engine: ScriptedEngine, num: int) -> bool:
    return len(engine.submissions) >= num


async def test_another_gateway_goes_on_and_every_line_is_there_once(tmp_path: Path) -> None:
    lines = jsonl(*(request(str(each)) for each in range(40)))
    async with serving(tmp_path, ScriptedEngine(step_s=0.01), max_in_flight=2) as stack:
        batch = await create(stack, lines)

        async def some() -> bool:
            counts = (await ok(stack, "GET", f"batches/{batch['id']}"))["request_counts"]
            return bool(counts["completed"] >= 5)

        await until(some)
    assert len(ledger_rows(tmp_path)) < 40
    async with serving(tmp_path) as stack:
        batch = await ended(stack, batch)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        found = await results(stack, batch["output_file_id"])
    assert sorted(int(each["custom_id"]) for each in found) == list(range(40))
    rows = ledger_rows(tmp_path)
    assert len(rows) == len({row.request_id for row in rows}) == 40
    assert {row.outcome for row in rows} == {"stop"}
    assert not list((tmp_path / "batches" / "work").iterdir())


async def test_counts_never_go_back_whichever_gateway_is_asked(tmp_path: Path) -> None:
    # A lease this long is renewed once a second, while results are counted ten times.
    async with (
        serving(tmp_path, ScriptedEngine(step_s=0.02), max_in_flight=2, lease_s=60.0) as one,
        serving(tmp_path, ScriptedEngine(step_s=0.02), max_in_flight=2, lease_s=60.0) as other,
    ):
        batch = await create(one, jsonl(*(request(str(each)) for each in range(60)), request("bad", model=1)))
        told: list[list[int]] = []

        async def ask_both() -> bool:
            for stack in (one, other):
                now = await ok(stack, "GET", f"batches/{batch['id']}")
                told.append([*now["request_counts"].values()])
            return now["status"] in ENDED

        await until(ask_both)
    assert all(later >= earlier for pair in pairwise(told) for earlier, later in zip(*pair, strict=True))
    assert told[-1] == [61, 60, 1]


async def test_lines_that_are_refused_for_load_are_tried_again(tmp_path: Path) -> None:
    busy = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "the queue is full", retry_after_s=0.05)
    engine = ScriptedEngine(refusal=busy)
    async with serving(tmp_path, engine) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(3))))
        await until(lambda: _reached(engine, 4))
        engine.refusal = None
        batch = await ended(stack, batch)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [row.outcome for row in ledger_rows(tmp_path)] == ["stop"] * 3


async def test_lines_run_behind_everybody_else(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as stack:
        await ended(stack, await create(stack, jsonl(request("a"))))
        await stack.chat()
        batch, direct = engine.submissions
    assert _context(batch).priority < _context(direct).priority
    assert _context(batch).tenant == _context(direct).tenant


def _context(submit: Any) -> Any:
    return context_pb2.RequestContext.FromString(submit.context.payload)


async def test_two_tenants_share_what_is_left_by_the_tokens_of_their_lines(tmp_path: Path) -> None:
    """One has short answers, one has long ones: both get half."""
    served: dict[str, int] = {"acme": 0, "other": 0}

    def reply(submit: Any, choice: int) -> list[int]:
        tenant = _context(submit).tenant
        text = "x" * (10 if tenant == "acme" else 160)
        served[tenant] += len(submit.prompt_token_ids) + len(text) + 1
        return [*encode(text), END_ID]

    engine = ScriptedEngine(reply=reply, tokens_per_step=64)
    async with serving(tmp_path, engine, max_in_flight=4) as stack:
        for tenant in served:
            # So many that the first does not end while the second is created on a busy machine.
            lines = jsonl(*(request(str(each)) for each in range(4000)))
            await create(stack, lines, tenant=tenant)
        await until(lambda: _both_begun(served))
        before = dict(served)

        async def enough() -> bool:
            return sum(served.values()) - sum(before.values()) > 40_000

        await until(enough)
        took = {tenant: served[tenant] - before[tenant] for tenant in served}
    share = took["acme"] / sum(took.values())
    assert 0.49 < share < 0.51, took


async def _both_begun(served: dict[str, int]) -> bool:
    return min(served.values()) > 500


async def test_without_a_folder_nothing_is_served_and_the_remedy_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, directory="") as stack:
        for path in ("files", "batches", "messages/batches"):
            missing = await call(stack, "GET", path)
            assert missing.status_code == 404
            assert "gateway.batches.directory" in missing.text


async def test_a_window_that_is_out_of_reach_is_said_to_be(tmp_path: Path) -> None:
    engine = ScriptedEngine(step_s=0.02)
    async with serving(tmp_path, engine, max_in_flight=1) as stack:
        lines = jsonl(*(request(str(each)) for each in range(2000)))
        batch = await create(stack, lines, completion_window="1m")

        async def told(of: dict[str, Any] = batch) -> Any:
            return (await ok(stack, "GET", f"batches/{of['id']}"))["status_detail"]

        detail = await until(told)
        assert "completion_window 1m is out of reach" in detail
        assert re.search(r" take [\d.]+ min, and [01]\.\d min are left; ", detail), detail
        await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        assert (await ended(stack, batch))["status"] == "cancelled"


async def test_what_has_expired_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        batch = await ended(stack, await create(stack, jsonl(request("a"))))
        service = _service(stack)
        content = tmp_path / "batches" / "files" / batch["output_file_id"]
        assert content.exists()
        service.store._clock = lambda: 4e9
        assert service.sweep() == 3
        assert not content.exists()
        assert (await call(stack, "GET", f"batches/{batch['id']}")).status_code == 404


def _service(stack: Deployment) -> Any:
    return stack.gateway._batches


async def test_expired_batch_tells_of_each_line_that_was_not_answered(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(tmp_path, engine, max_in_flight=1) as stack:
        gate = _after(engine, 2)
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(6))))
        await until(lambda: _reached(engine, 3))
        service = _service(stack)
        now = service.store._clock
        service.store._clock = lambda: now() + 25 * 3600
        batch = await ended(stack, batch)
        gate.set()
        service.store._clock = now
        assert batch["status"] == "expired"
        assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 0}
        rest = await results(stack, batch["error_file_id"])
    assert {each["error"]["code"] for each in rest} == {"batch_expired"}
    assert len(rest) == 4


async def test_operators_see_what_becomes_of_batches(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(tmp_path, engine, max_in_flight=1, sweep_interval_s=0.05) as stack:
        gate = _after(engine, 2)
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(4)), b"{no json"))

        async def told(*lines: str) -> bool:
            exposed = (await stack.http.get("/metrics")).text
            return all(line in exposed.splitlines() for line in lines)

        size = (await ok(stack, "GET", f"files/{batch['input_file_id']}"))["bytes"]
        await until(
            lambda: told(
                'millrace_batches_running{status="in_progress"} 1.0',
                "millrace_batches_oldest_waiting_seconds 0.0",
                "millrace_batch_lines_running 1.0",
                f"millrace_batch_file_bytes {float(size)}",
                'millrace_batches_ended_total{status="completed"} 0.0',
            )
        )
        gate.set()
        await ended(stack, batch)
        await until(
            lambda: told(
                'millrace_batches_running{status="in_progress"} 0.0',
                'millrace_batch_lines_total{outcome="succeeded",tenant="acme"} 4.0',
                'millrace_batch_lines_total{outcome="errored",tenant="acme"} 1.0',
                'millrace_batches_ended_total{status="completed"} 1.0',
            )
        )


async def test_a_line_that_is_too_long_is_an_error_line_though_it_is_the_only_one(tmp_path: Path) -> None:
    async with serving(tmp_path, tables={"gateway": {"max_body_bytes": 4096}}) as stack:
        batch = await ended(stack, await create(stack, jsonl(request("long", "x" * 5000))))
        (line,) = await results(stack, batch["error_file_id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)
    assert (line["error"]["code"], line["error"]["line"]) == ("request_too_large", 1)


async def test_two_files_in_one_form_are_refused_by_their_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        files = [("file", ("a", b"1")), ("file", ("b", b"2"))]
        refused = await call(stack, "POST", "files", files=files, data={"purpose": "batch"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
        assert not list((tmp_path / "batches" / "uploads").iterdir())


async def test_input_whose_content_is_gone_fails_the_batch_by_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as stack:
        file = (await upload(stack, jsonl(request("a")))).json()
        (tmp_path / "batches" / "files" / file["id"]).unlink()
        assert (await call(stack, "GET", f"files/{file['id']}/content")).status_code == 404
        asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = await ended(stack, await ok(stack, "POST", "batches", json=asked))
    assert (batch["status"], batch["errors"]["data"][0]["param"]) == ("failed", "input_file_id")


async def test_lines_under_way_are_so_many_for_each_engine_of_their_model(tmp_path: Path) -> None:
    """Engines of other models do not count."""
    told, most = ScriptedEngine().reply, [0]

    def reply(submit: Any, choice: int) -> list[int]:
        most.append(engine.num_running)
        return told(submit, choice)

    engine = ScriptedEngine(step_s=0.01, reply=reply)
    others = [ScriptedEngine(name=f"other-{each}", model="big") for each in range(3)]
    tables = {"served": {"models": {"tiny": {"path": "t"}, "big": {"path": "b"}}}}
    async with serving(tmp_path, engine, *others, tables=tables, max_in_flight=2) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(40))))
        assert (await ended(stack, batch))["request_counts"]["completed"] == 40
    assert max(most) == 2


async def test_who_has_too_many_batches_is_told_what_makes_room(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with serving(tmp_path, engine, max_batches=1) as stack:
        gate = _after(engine, 1)
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(3))))
        asked = {
            "input_file_id": batch["input_file_id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        refused = await call(stack, "POST", "batches", json=asked)
        gate.set()
        message = refused.json()["error"]["message"]
        assert message.endswith("(gateway.batches.max_batches); wait until one has ended, or cancel one")
        await ended(stack, batch)


async def test_lines_leave_streams_to_requests_of_their_own_tenant(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    tables = {"tenants": {"other": {}, "acme": {"max_concurrent_streams": 4, "requests_per_minute": 100}}}
    async with serving(tmp_path, engine, tables=tables, max_in_flight=16) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(60))))
        await until(lambda: _reached(engine, 20))
        engine.gate.clear()

        async def one_was_refused() -> bool:
            refused = any(job._most_taken < 16 for job in _service(stack)._runner._jobs.values())
            return refused and engine.num_running >= 3

        await until(one_was_refused)
        assert engine.num_running == 3
        chat = asyncio.create_task(stack.chat())
        await until(lambda: _running(engine, 4))
        engine.gate.set()
        assert (await chat).status_code == 200
        assert (await ended(stack, batch))["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


async def test_as_many_lines_run_as_the_tenant_has_streams_without_a_pause(tmp_path: Path) -> None:
    engine = ScriptedEngine(step_s=0.001)
    tables = {"tenants": {"other": {}, "acme": {"max_concurrent_streams": 4}}}
    async with serving(tmp_path, engine, tables=tables, max_in_flight=16) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(100))))
        await until(lambda: _reached(engine, 60))
        (job,) = _service(stack)._runner._jobs.values()
        assert 3 <= job._most_taken < 5
        # A line that is refused for want of a stream holds up no other.
        assert job._not_before_s == 0
        assert (await ended(stack, batch))["request_counts"]["completed"] == 100
