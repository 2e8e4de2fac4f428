"""Who calls the HTTP face: by a key, by a context that somebody has signed, or not at all."""

from __future__ import annotations

import asyncio
import base64
import pkgutil
import re
from importlib import import_module
from typing import Any

import httpx
import pytest

import gateway
from gateway.auth.authorizer import AUTHORIZE_PREFIX, CLAIMS_HEADER, QUESTION_HEADER, TIMEOUT_HEADER
from gateway.auth.directory import hash_key
from gateway.envoy.replies import DOCUMENTS
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine

KEY = "mr-test"
TABLES: dict[str, Any] = {
    "keys": {"entries": [{"id": "k1", "tenant": "acme", "hash": hash_key(KEY)}]},
    "tenant": {"requests_per_minute": 2},
}


async def ask(rig: Deployment, path: str = "/v1/models", **headers: str) -> httpx.Response:
    """Without what the rig's own client sends."""
    async with httpx.AsyncClient(base_url=rig.http.base_url) as client:
        return await client.get(path, headers=headers)


async def test_requests_with_a_key_are_counted_and_those_with_a_context_have_been() -> None:
    async with deployed(tables=TABLES) as rig:
        bearer = {"authorization": f"Bearer {KEY}"}
        for left in ("1", "0"):
            answer = await ask(rig, **bearer)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        refused = await ask(rig, **bearer)
        assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "REQUEST_RATE_EXCEEDED")
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(refused.headers["retry-after"]) >= 1
        # The rig's client sends a signed context.
        assert (await rig.http.get("/v1/models")).status_code == 200
        assert (await rig.http.get("/v1/models/")).json() == (await rig.http.get("/v1/models")).json()


async def test_a_client_says_how_long_it_waits() -> None:
    async with deployed(ScriptedEngine(reply=lambda submit, choice: [1] * 3000, step_s=0.02)) as rig:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000}
        waits = {TIMEOUT_HEADER: "300"}
        late = await rig.http.post("/v1/chat/completions", json=body, headers=waits)
        assert (late.status_code, late.json()["error"]["reason"]) == (504, "DEADLINE_EXCEEDED")
        for bad in ("0", "-1", "1.5", "soon", "9" * 10, ""):
            refused = await rig.http.get("/v1/models", headers={TIMEOUT_HEADER: bad})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, TIMEOUT_HEADER)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/nothing"])
async def test_without_a_key_nothing_is_told(path: str) -> None:
    async with deployed(tables=TABLES) as rig:
        answer = await ask(rig, path)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (401, "MISSING_CREDENTIALS")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await ask(rig, path, **{CONTEXT_HEADER: "forged"})).status_code == 401


async def test_every_document_is_one_that_the_edge_asks_no_key_for() -> None:
    modules = [
        import_module(each.name)
        for each in pkgutil.walk_packages(gateway.__path__, "gateway.")
        if each.name.endswith("openapi")
    ]
    assert {each.PATH for each in modules if hasattr(each, "PATH")} == set(DOCUMENTS)
    async with deployed(tables=TABLES) as rig:
        for path in DOCUMENTS:
            answer = await ask(rig, path)
            if "/batches/" in path:
                # No folder of batches is configured.
                assert answer.status_code == 401, path
                continue
            assert answer.json()["paths"][path]["get"]["security"] == [], path


@pytest.mark.parametrize("path", ["/health", *(each for each in DOCUMENTS if "/batches/" not in each)])
async def test_what_needs_no_key_tells_without_one_how_it_is_asked(path: str) -> None:
    async with deployed(tables=TABLES) as rig, httpx.AsyncClient(base_url=rig.http.base_url) as client:
        answer = await client.request("TRACE", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_large_body_is_not_taken_from_nobody(framing: str) -> None:
    async with deployed(tables=TABLES) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.http.port)
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        # The body is never sent: whoever waited for it would wait for good.
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in head
        writer.close()


async def test_only_a_question_is_answered_with_a_context() -> None:
    async with deployed(tables=TABLES) as rig:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = await ask(rig, f"{AUTHORIZE_PREFIX}v1/models", **headers)
        assert answer.status_code == 404
        assert CONTEXT_HEADER not in answer.headers
        answer = await ask(rig, f"{AUTHORIZE_PREFIX}v1/models", **headers, **{QUESTION_HEADER: "1"})
        assert CONTEXT_HEADER in answer.headers


async def test_who_asks_for_a_path_that_is_not_there_is_told_every_description() -> None:
    async with deployed(tables=TABLES) as rig:
        answer = await ask(rig, "/v1/nothing", authorization=f"Bearer {KEY}")
        assert answer.status_code == 404
        told = re.findall(r"/[a-z0-9/]*openapi\.json", answer.json()["error"]["message"])
        for path in told:
            assert (await ask(rig, path)).status_code == 200
    apis = ("", "/v1/embeddings", "/v1/messages", "/v1/responses")
    assert {f"{each}/openapi.json" for each in apis} <= set(told)


async def test_refusals_of_callers_are_in_the_document() -> None:
    # Claims that the edge has verified, of a tenant that is not there.
    claims = base64.urlsafe_b64encode(b'{"tenant": "nobody", "sub": "someone"}').decode()
    tables = {
        **TABLES,
        "keys": {"jwt": {"issuer": "https://issuer.test", "jwks_url": "https://issuer.test/k"}},
    }
    async with deployed(tables=tables) as rig:
        document = (await ask(rig, "/openapi.json")).json()
        refusals = [await ask(rig), await ask(rig, **{CLAIMS_HEADER: claims})]
        assert [each.status_code for each in refusals] == [401, 403]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                responses = operation["responses"]
                # Health is told to everybody.
                told = refusals if operation.get("security") != [] else []
                assert {str(each.status_code) for each in told} <= set(responses), path
                # The edge answers every path with these, whatever is behind it.
                assert {"400", "413", "429", "503", "504"} <= set(responses), path
                for each in told:
                    assert "x-request-id" in responses[str(each.status_code)]["headers"]
