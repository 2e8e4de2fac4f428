"""A request's own cache salt lies within its tenant's: the same one shares, another one shares nothing."""

from __future__ import annotations

from typing import Any

import pytest
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.inference.v1 import inference_pb2

from contract.prefix import narrowed
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
}


def salts(stack: Deployment) -> list[bytes]:
    """Those under which engines were asked, in order."""
    return [
        context_pb2.RequestContext.FromString(each.context.payload).cache_salt
        for each in stack.engines[0].submissions
    ]


@pytest.mark.parametrize("path", BODIES)
async def test_engines_are_asked_under_the_requests_salt_within_the_tenants(path: str) -> None:
    async with deployed() as stack:
        for salt in (None, "a", "b", "a"):
            more = {} if salt is None else {"cache_salt": salt}
            served = await stack.http.post(path, json={"model": "tiny", **BODIES[path], **more})
            assert served.status_code == 200, served.text
        plain, first, other, again = salts(stack)
        assert first == again == narrowed(plain, "a")
        assert len({plain, first, other}) == 3


async def test_another_tenant_does_not_reach_it_with_the_same_salt() -> None:
    found = []
    async with deployed() as stack:
        for tenant_salt in (b"x", b"y"):
            headers = {CONTEXT_HEADER: signed_context(cache_salt=tenant_salt)}
            body = {"model": "tiny", "messages": HI, "cache_salt": "same"}
            served = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
            assert served.status_code == 200, served.text
        found = salts(stack)
    assert found == [narrowed(b"x", "same"), narrowed(b"y", "same")]
    assert found[0] != found[1]


async def test_grpc_has_it_too() -> None:
    metadata = ((CONTEXT_HEADER, signed_context(cache_salt=b"x")),)
    said = chat_pb2.Conversation(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content="hi")])
    async with deployed() as stack:
        chat = inference_pb2.ChatRequest(model="tiny", conversation=said, cache_salt="s")
        assert [each async for each in stack.inference.Chat(chat, metadata=metadata)]
        generate = inference_pb2.GenerateRequest(model="tiny", text="hi", cache_salt="s")
        assert [each async for each in stack.inference.Generate(generate, metadata=metadata)]
        assert salts(stack) == [narrowed(b"x", "s")] * 2


@pytest.mark.parametrize("salt", ["", "x" * 257])
@pytest.mark.parametrize("path", BODIES)
async def test_none_and_too_long_ones_are_refused(path: str, salt: str) -> None:
    engine = ScriptedEngine()
    async with deployed(engine) as stack:
        body = {"model": "tiny", **BODIES[path], "cache_salt": salt}
        refused = await stack.http.post(path, json=body)
        assert refused.status_code == 400
        assert "cache_salt" in refused.text
        assert not engine.submissions


def test_parts_of_salts_do_not_run_together() -> None:
    assert narrowed(b"a", "bc") != narrowed(b"ab", "c")
