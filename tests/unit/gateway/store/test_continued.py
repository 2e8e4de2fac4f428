"""What requests continue of what is kept, what is told of what they leave out, and what is kept of answers
that nobody reads to their end.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.faces.unserved import WARNING_HEADER
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.faces_responses.test_responses import ADD, CALL, says
from tests.unit.gateway.rig.deployment import Deployment, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.store.test_endpoints import create, engine, get, prompt, send, serving

LONG = "It is four, and it was four yesterday. " * 40


def result_of(response: dict[str, Any], output: str = "5") -> dict[str, Any]:
    (call,) = [each for each in response["output"] if each["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def event_of(block: str) -> dict[str, Any]:
    return dict(json.loads(block.partition("data: ")[2]))


async def refused(stack: Deployment, path: str = "responses", **body: Any) -> dict[str, Any]:
    response = await send(stack, "POST", path, model="tiny", **{"input": "x", **body})
    assert response.status_code >= 400, response.text
    return dict(response.json()["error"])


@pytest.mark.parametrize("path", ["responses", "responses/input_tokens", "responses/compact"])
async def test_ids_that_are_empty_are_refused(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as stack:
        error = await refused(stack, path, previous_response_id="")
        assert (error["param"], error["code"]) == ("previous_response_id", "invalid_value")
        assert "empty" in error["message"]
        for conversation in ("", {"id": ""}) if path != "responses/compact" else ():
            error = await refused(stack, path, conversation=conversation)
            assert (error["param"], error["code"]) == ("conversation", "invalid_value")
        error = await refused(stack, path, input=[{"type": "item_reference"}])
        assert (error["param"], error["code"]) == ("input[0].id", "invalid_value")


async def test_counting_and_compacting_take_what_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, engine("It is 4.")) as stack:
        first = await create(stack, "2+2?")
        whole = [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "It is 4."},
            {"role": "user", "content": "Sure?"},
        ]
        counts = [
            await send(stack, "POST", "responses/input_tokens", model="tiny", **asked)
            for asked in ({"input": whole}, {"input": "Sure?", "previous_response_id": first["id"]})
        ]
        assert counts[0].json() == counts[1].json()
        assert counts[0].json()["input_tokens"] > len("2+2?It is 4.Sure?")
        compacted = await send(
            stack, "POST", "responses/compact", model="tiny", input="Sure?", previous_response_id=first["id"]
        )
        assert compacted.status_code == 200, compacted.text
        assert prompt(stack)[:3] == ["2+2?", "It is 4.", "Sure?"]
        *said, summary = compacted.json()["output"]
        assert [each["content"][0]["text"] for each in said] == ["2+2?", "Sure?"]
        # Nothing of it is kept, and it begins a conversation.
        assert (await send(stack, "GET", f"responses/{compacted.json()['id']}")).status_code == 404
        await create(stack, [*said, summary, {"role": "user", "content": "And?"}])
        # What is not there, or is not kept, is said as of a response.
        for path in ("responses/input_tokens", "responses/compact"):
            missing = await send(
                stack, "POST", path, model="tiny", input="x", previous_response_id="resp_never"
            )
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "previous_response_id")
    async with serving(tmp_path, tenants=["acme"]) as stack:
        for path in ("responses/input_tokens", "responses/compact"):
            told = await send(
                stack, "POST", path, tenant="other", model="tiny", input="x", previous_response_id=first["id"]
            )
            assert (told.status_code, told.json()["error"]["param"]) == (400, "previous_response_id")


async def test_what_truncation_leaves_out_of_what_is_kept_is_told(tmp_path: Path) -> None:
    """A call that is left out takes its result along: a template would refuse it."""
    async with serving(tmp_path, engine(CALL), gateway={"request": {"max_messages": 4}}) as stack:
        call = await create(stack, "one", tools=[ADD])
        told = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            tools=[ADD],
            input=[result_of(call), {"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
            previous_response_id=call["id"],
            truncation="auto",
        )
        assert told.status_code == 200, told.text
        assert prompt(stack) == ["two", "three"]
        (warning,) = [each for each in told.headers.get_list(WARNING_HEADER) if "truncation" in each]
        assert "all stored items but the newest 0" in warning
        assert "1 results in input went with their calls" in warning
        # And of what is kept itself.
        told = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            tools=[ADD],
            input=[{"role": "user", "content": "four"}],
            previous_response_id=told.json()["id"],
            truncation="auto",
        )
        assert prompt(stack)[-1] == "four"
        assert "truncation left out all stored items" in told.headers[WARNING_HEADER]
        # Where everything has room nothing is said.
        whole = await send(
            stack, "POST", "responses", model="tiny", input="five", truncation="auto", tools=[ADD]
        )
        assert WARNING_HEADER not in whole.headers


async def test_what_is_longer_than_any_prompt_is_cut_and_told(tmp_path: Path) -> None:
    small = engine("It is 4.", max_model_len=300)
    async with serving(tmp_path, small) as stack:
        conversation = (await send(stack, "POST", "conversations")).json()["id"]
        for number in range(3):
            items = [
                {"role": "user", "content": f"{number} " + "x" * 2000},
                {"role": "assistant", "content": "y"},
            ]
            added = await send(stack, "POST", f"conversations/{conversation}/items", items=items)
            assert added.status_code == 200, added.text
        error = await refused(stack, conversation=conversation)
        assert error["code"] == "context_length_exceeded"
        told = await send(
            stack,
            "POST",
            "responses",
            model="tiny",
            input="x",
            conversation=conversation,
            truncation="auto",
            max_output_tokens=10,
        )
        assert told.status_code == 200, told.text
        warnings = " ".join(told.headers.get_list(WARNING_HEADER))
        assert "truncation left out all stored items but the newest" in warnings
        assert "truncation left out the oldest" in warnings


async def test_a_result_that_answers_no_call_of_the_chain_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(CALL)) as stack:
        first = await create(stack, "one", tools=[ADD])
        stray = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "5"}
        error = await refused(stack, input=[stray], previous_response_id=first["id"])
        assert (error["param"], error["code"]) == ("input[0].call_id", "invalid_value")
        await create(stack, [result_of(first)], tools=[ADD], previous_response_id=first["id"])


async def test_a_stream_that_its_client_leaves_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    slow = ScriptedEngine(reply=says(LONG), step_s=0.005)
    async with serving(tmp_path, slow) as stack:
        body = {"model": "tiny", "input": "hi", "stream": True}
        headers = {CONTEXT_HEADER: signed_context("left")}
        read = ""
        async with stack.http.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
            async for piece in answer.aiter_text():
                read += piece
                if read.count("response.output_text.delta") > 20:
                    break
        made = event_of(read.split("\n\n")[0])["response"]["id"]
        while (found := await send(stack, "GET", f"responses/{made}")).status_code == 404:
            await asyncio.sleep(0.01)
        told = found.json()
        assert (told["status"], told["store"], told["incomplete_details"]) == ("cancelled", True, None)
        ((item,), text) = (
            told["output"],
            "".join(
                event_of(each)["delta"] for each in read.split("\n\n")[:-1] if "output_text.delta" in each
            ),
        )
        assert item["status"] == "incomplete"
        assert item["content"][0]["text"].startswith(text)
        assert LONG.startswith(item["content"][0]["text"])
        assert told["usage"]["output_tokens"] > 0
        # It can be gone on with.
        slow.step_s = 0.0
        await create(stack, "Go on.", previous_response_id=made)
        assert prompt(stack) == ["hi", item["content"][0]["text"], "Go on."]


async def test_a_stream_that_fails_is_kept_with_its_error(tmp_path: Path) -> None:
    dying = engine(LONG, dies_after_tokens=30)
    async with serving(tmp_path, dying) as stack:
        streamed = await send(stack, "POST", "responses", model="tiny", input="hi", stream=True)
        last = event_of(streamed.text.rstrip().split("\n\n")[-2])
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"]
        assert await get(stack, f"responses/{last['response']['id']}") == last["response"]


async def test_a_call_that_was_cut_is_not_gone_on_with(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(CALL)) as stack:
        cut = await create(stack, "one", tools=[ADD], max_output_tokens=60)
        (item,) = cut["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")
        await create(stack, "two", tools=[ADD], previous_response_id=cut["id"])
        assert prompt(stack) == ["one", "two"]


async def test_a_cancelled_response_has_what_was_told_of_it(tmp_path: Path) -> None:
    slow = ScriptedEngine(reply=says("<think>Hm.</think>" + LONG), step_s=0.005)
    async with serving(tmp_path, slow) as first, serving(tmp_path) as second:
        made = await create(first, background=True)
        path = f"responses/{made['id']}"

        async def followed() -> str:
            return (await send(second, "GET", f"{path}?stream=true")).text

        following = asyncio.create_task(followed())
        told: list[str] = []
        while not any("output_text.delta" in each for each in told):
            events, _ = await _events(second, made["id"])
            told = [each.decode() for each in events]
            await asyncio.sleep(0.01)
        cancelled = (await send(second, "POST", f"{path}/cancel")).json()
        *blocks, done = (await following).rstrip().split("\n\n")
        assert done == "data: [DONE]"
        events = [event_of(each) for each in blocks]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        assert last["response"] == cancelled == await get(first, path)
        thought, message = cancelled["output"]
        assert (thought["type"], thought["status"], message["status"]) == (
            "reasoning",
            "completed",
            "incomplete",
        )
        text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
        assert message["content"][0]["text"] == text
        assert text
        assert LONG.startswith(text)
        # Before anything was told of one its stream is whole, too.
        slow.gate.clear()
        early = await create(first, background=True)
        assert (await send(first, "POST", f"responses/{early['id']}/cancel")).json()["output"] == []
        streamed = (await send(second, "GET", f"responses/{early['id']}?stream=true")).text
        kinds = [event_of(each)["type"] for each in streamed.rstrip().split("\n\n")[:-1]]
        assert kinds == ["response.created", "response.in_progress", "response.incomplete"]
        slow.gate.set()


async def _events(stack: Deployment, id_: str) -> tuple[list[bytes], bool]:
    store = stack.gateway._store
    assert store is not None
    return await store.call(store.background.events, "acme", id_, -1)
