"""What a client and a gateway see of each other through the real Envoy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from envoy_api.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from contract.errors import Reason
from contract.proto.status import from_status
from gateway.envoy.replies import DOCUMENTS
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.error_form import FORMS, PREFIX, reason_in_other_form

from .edge import GOOD_KEY, MAX_BODY_BYTES, REQUESTS_PER_MINUTE, REVOKED_KEY, SLOW_KEY, Edge, verified

pytestmark = pytest.mark.asyncio(loop_scope="module")
BEARER = {"authorization": f"Bearer {GOOD_KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    edge = Edge(Path(tmp_path_factory.mktemp("edge")))
    await edge.start()
    yield edge
    await edge.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def stub(edge: Edge) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_good_key_becomes_a_context(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", headers=BEARER, content=b"{}")
    headers = response.json()["headers"]
    identity, context = verified(headers["x-millrace-context"])
    assert (identity.tenant, identity.key_id, identity.tier) == ("acme", "good", "standard")
    assert identity.allowed_models == ("m",)
    assert identity.request_id == response.headers["x-request-id"] == headers["x-request-id"]
    assert (context.priority, context.weight, context.ttft_target_ms) == (3, 2.0, 900)
    assert context.queue_limit_ms == 900, "what would come later than its target is not accepted"
    # Who calls is told to the edge, not to the client.
    assert not [name for name in response.headers if name.startswith("x-millrace-")]


async def test_descriptions_need_no_key(client: httpx.AsyncClient) -> None:
    for path in DOCUMENTS:
        response = await client.get(f"{path}?of=this")
        assert response.status_code == 200, path
        assert "x-millrace-context" not in response.json()["headers"]
        # What is beside them does.
        assert (await client.get(f"{path}x")).status_code == 401


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
async def test_a_key_is_taken_from_the_headers_of_other_apis(
    edge: Edge, client: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceServiceStub, name: str
) -> None:
    key = {name: BEARER["authorization"].removeprefix("Bearer ")}
    response = await client.get("/v1/models", headers=key)
    assert verified(response.json()["headers"]["x-millrace-context"])[0].key_id == "good"
    call = stub.Chat(inference_pb2.ChatRequest(), metadata=tuple(key.items()))
    edge.faces.items.put_nowait(None)
    assert await call.read() is grpc.aio.EOF
    assert verified(edge.faces.metadata["x-millrace-context"])[0].key_id == "good"
    assert name not in edge.faces.metadata


FORGED = {
    "x-millrace-context": "forged",
    "x-millrace-tenant": "other",
    "x-millrace-key": "other",
    "x-millrace-counted": "1",
    "x-millrace-jwt-claims": "eyJ0ZW5hbnQiOiJsaW1pdGVkIn0",
}


async def test_client_cannot_set_identity_headers(client: httpx.AsyncClient) -> None:
    response = await client.get("/anything", headers={**BEARER, **FORGED})
    headers = response.json()["headers"]
    assert verified(headers.pop("x-millrace-context"))[0].tenant == "acme"
    assert not set(FORGED) & set(headers)


async def test_client_cannot_set_identity_metadata(
    edge: Edge, stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    edge.faces.items.put_nowait(None)
    call = stub.Chat(inference_pb2.ChatRequest(), metadata=tuple({**BEARER, **FORGED}.items()))
    assert await call.read() is grpc.aio.EOF
    metadata = edge.faces.metadata
    identity, _ = verified(metadata["x-millrace-context"])
    assert (identity.tenant, metadata["x-millrace-tenant"]) == ("acme", "acme")
    assert (identity.key_id, metadata["x-millrace-key"]) == ("good", "good")
    assert "x-millrace-jwt-claims" not in metadata
    assert "x-millrace-counted" not in metadata


@pytest.mark.parametrize("credential", [None, "mr-wrong"])
async def test_nobody_may_forge_an_identity_instead_of_a_key(
    client: httpx.AsyncClient, credential: str | None
) -> None:
    headers = FORGED if credential is None else {**FORGED, "authorization": f"Bearer {credential}"}
    response = await client.post("/v1/chat/completions", headers=headers, content=b"{}")
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


async def test_public_page_needs_no_key_and_gets_no_context(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"x-millrace-context": "forged"})
    assert (response.status_code, response.text) == (200, "no context")


async def test_client_request_id_is_kept_beside_our_own(client: httpx.AsyncClient) -> None:
    response = await client.get("/x", headers={**BEARER, "x-request-id": "mine"})
    headers = response.json()["headers"]
    assert headers["x-client-request-id"] == "mine"
    assert headers["x-request-id"] == response.headers["x-request-id"] != "mine"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, Reason.MISSING_CREDENTIALS),
        ({"authorization": "Bearer mr-wrong"}, Reason.INVALID_CREDENTIALS),
        ({"authorization": f"Bearer {REVOKED_KEY}"}, Reason.INVALID_CREDENTIALS),
        ({"authorization": "Basic bXItZ29vZA=="}, Reason.INVALID_CREDENTIALS),
        ({"x-api-key": "mr-wrong"}, Reason.INVALID_CREDENTIALS),
        ({"api-key": ""}, Reason.MISSING_CREDENTIALS),
    ],
)
async def test_bad_credentials_get_the_openai_body(
    client: httpx.AsyncClient, headers: dict[str, str], reason: Reason
) -> None:
    response = await client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.headers["content-type"] == "application/json"
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert (error["type"], error["reason"], error["param"]) == ("authentication_error", reason.value, None)
    assert "mr-" not in error["message"] or "begin with 'mr-'" in error["message"]


async def test_bad_credentials_are_a_rich_status_in_grpc(
    stub: inference_pb2_grpc.InferenceServiceStub,
) -> None:
    call = stub.Chat(inference_pb2.ChatRequest(), metadata=(("authorization", "Bearer mr-wrong"),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "`millrace keys create`" in (caught.value.details() or "")
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert from_status(status).reason is Reason.INVALID_CREDENTIALS


async def test_grpc_stream_passes_message_by_message(
    edge: Edge, stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    call = stub.Chat(inference_pb2.ChatRequest(), metadata=tuple(BEARER.items()))
    for item in ("one", "two", "three"):
        # The next item is made only after the previous one has arrived.
        edge.faces.items.put_nowait(item)
        assert (await call.read()).model == item
    edge.faces.items.put_nowait(None)
    assert await call.read() is grpc.aio.EOF
    assert verified(edge.faces.metadata["x-millrace-context"])[0].tenant == "acme"
    assert "authorization" not in edge.faces.metadata


GRPC_WEB = {"content-type": "application/grpc-web+proto", "x-grpc-web": "1"}


def web_frames(body: bytes) -> list[tuple[int, bytes]]:
    """Flag and content of every frame of a gRPC-Web answer; the flag of the trailers is 128."""
    frames = []
    while body:
        length = int.from_bytes(body[1:5], "big")
        frames.append((body[0], body[5 : 5 + length]))
        body = body[5 + length :]
    return frames


async def test_grpc_web_is_answered_with_messages_and_trailers_in_the_body(
    edge: Edge, client: httpx.AsyncClient
) -> None:
    for item in ("one", "two", None):
        edge.faces.items.put_nowait(item)
    path, message = "/millrace.inference.v1.InferenceService/Chat", inference_pb2.ChatRequest()
    data = message.SerializeToString()
    response = await client.post(
        path, headers={**BEARER, **GRPC_WEB}, content=b"\0" + len(data).to_bytes(4, "big") + data
    )
    assert response.headers["content-type"] == "application/grpc-web+proto"
    *messages, (flag, trailers) = web_frames(response.content)
    assert [inference_pb2.ChatResponse.FromString(each).model for _, each in messages] == ["one", "two"]
    assert flag == 128
    assert b"grpc-status:0" in trailers
    assert verified(edge.faces.metadata["x-millrace-context"])[0].tenant == "acme"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
async def test_grpc_web_is_refused_in_its_own_form(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    path = "/millrace.inference.v1.InferenceService/Chat"
    response = await client.post(path, headers={**headers, **GRPC_WEB}, content=b"\0\0\0\0\0")
    assert response.headers["content-type"].startswith("application/grpc-web")
    told = {**response.headers, "": str(web_frames(response.content))}
    assert told.get("grpc-status") == "16" or "grpc-status:16" in told[""]


async def test_server_sent_events_are_not_buffered(edge: Edge, client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/events", headers=BEARER) as response:
        lines = response.aiter_lines()
        for item in ("one", "two", "three"):
            edge.faces.items.put_nowait(item)
            assert await anext(lines) == f"data: {item}"
            assert await anext(lines) == ""
        edge.faces.items.put_nowait(None)
        assert [line async for line in lines] == ["data: [DONE]", ""]


async def test_requests_per_minute(
    client: httpx.AsyncClient, stub: inference_pb2_grpc.InferenceServiceStub
) -> None:
    bearer = {"authorization": f"Bearer {SLOW_KEY}"}
    for sent in range(1, REQUESTS_PER_MINUTE + 1):
        response = await client.get("/v1/models", headers=bearer)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == str(REQUESTS_PER_MINUTE)
        assert response.headers["x-ratelimit-remaining-requests"] == str(REQUESTS_PER_MINUTE - sent)
    response = await client.get("/v1/models", headers=bearer)
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["reason"], error["type"]) == ("REQUEST_RATE_EXCEEDED", "rate_limit_error")
    assert 1 <= int(response.headers["retry-after"]) <= 61
    assert response.headers["x-ratelimit-remaining-requests"] == "0"

    call = stub.Chat(inference_pb2.ChatRequest(), metadata=tuple(bearer.items()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    assert status is not None
    refusal = from_status(status)
    assert refusal.reason is Reason.REQUEST_RATE_EXCEEDED
    assert refusal.retry_after_s is not None


async def test_body_beyond_the_limit_is_refused_by_its_length(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", headers=BEARER, content=b"x" * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["reason"] == "REQUEST_TOO_LARGE"
    assert str(MAX_BODY_BYTES) in error["message"]
    response = await client.post("/v1/completions", headers=BEARER, content=b"x" * MAX_BODY_BYTES)
    assert response.json()["num_bytes"] == MAX_BODY_BYTES


async def test_http2_without_tls_on_the_same_port(edge: Edge) -> None:
    reader, writer = await asyncio.open_connection(*edge.address.split(":"))
    # Connection preface and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    header = await reader.readexactly(9)
    assert header[3] == 4
    writer.close()
    await writer.wait_closed()


async def test_grpc_health_needs_no_key(edge: Edge) -> None:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_rate_limits_cannot_be_spent_from_outside(edge: Edge) -> None:
    """Whoever could ask the rate limit service would spend others' limits."""
    async with grpc.aio.insecure_channel(edge.address) as channel:
        call = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(
            rls_pb2.RateLimitRequest(domain="millrace"), metadata=tuple(BEARER.items())
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


PATHS_TO_AUTHORIZATION = (
    "/edge/authorize/v1/models",
    "/edge/authorize/edge/authorize/v1/models",
    "//edge//authorize/v1/models",
    "/v1/../edge/authorize/v1/models",
    "/v1/%2e%2e/edge/authorize/v1/models",
    "/%65dge/authorize/v1/models",
    "/edge/authorize%2fv1/models",
    "/edge/authorize/../authorize/",
    "/edge/authorize",
    "/EDGE/AUTHORIZE/v1/models",
    "/edge/authorize/v1/models?x=1",
    "http://elsewhere/edge/authorize/v1/models",
)


@pytest.mark.parametrize("content_type", ["application/json", "application/grpc"])
async def test_authorization_cannot_be_asked_from_outside(edge: Edge, content_type: str) -> None:
    """Whoever could ask it would be handed a signed context, and could choose what is in it."""
    # Envoy lets a connection linger for a second before it closes: they linger together.
    answers = await asyncio.gather(*(_ask(edge, path, content_type) for path in PATHS_TO_AUTHORIZATION))
    for path, answer in zip(PATHS_TO_AUTHORIZATION, answers, strict=True):
        head, _, body = answer.lower().partition(b"\r\n\r\n")
        assert CONTEXT_HEADER.encode() not in head, path
        if b" 200 ok" in head.splitlines()[0] and b"grpc-status" not in head:
            # It went to the face that serves clients, as a path that is nothing there.
            assert b"num_bytes" in body, path


async def _ask(edge: Edge, path: str, content_type: str) -> bytes:
    reader, writer = await asyncio.open_connection(*edge.address.split(":"))
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: edge\r\nauthorization: {BEARER['authorization']}\r\n"
        f"x-millrace-question: 1\r\ncontent-type: {content_type}\r\ncontent-length: 0\r\n"
        "connection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    return answer


async def test_gateway_that_is_gone_is_said_in_both_forms(tmp_path: Path) -> None:
    edge = Edge(tmp_path)
    await edge.start()
    try:
        await edge.http.stop()
        async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
            response = await client.get("/v1/models", headers=BEARER)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"
        assert response.headers["retry-after"] == "1"
        async with grpc.aio.insecure_channel(edge.address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Chat(
                inference_pb2.ChatRequest(), metadata=tuple(BEARER.items())
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "no gateway process authorized the request in time; retry shortly"
    finally:
        await edge.stop()


async def test_a_reply_of_envoys_own_has_the_form_of_its_path(tmp_path: Path) -> None:
    edge = Edge(tmp_path, FORMS)
    await edge.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
            too_large = bytes(MAX_BODY_BYTES + 1)
            for content, headers, status, reason in (
                (b"{}", {}, 401, "MISSING_CREDENTIALS"),
                (too_large, BEARER, 413, "REQUEST_TOO_LARGE"),
                (b"{}", BEARER, 503, "ENGINE_UNAVAILABLE"),
            ):
                if status == 503:
                    await edge.http.stop()
                response = await client.post(f"{PREFIX}/messages?x=1", headers=headers, content=content)
                assert (response.status_code, reason_in_other_form(response.content)) == (status, reason)
                assert response.headers["content-type"] == "application/other+json"
                response = await client.post("/v1/completions", headers=headers, content=content)
                assert (response.status_code, response.json()["error"]["reason"]) == (status, reason)
                assert response.headers["content-type"] == "application/json"
    finally:
        await edge.stop()


PREFLIGHT = {
    "origin": "https://chat.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_pages_of_a_configured_origin_may_call(tmp_path: Path) -> None:
    edge = Edge(tmp_path, envoy={"cors_origins": [PREFLIGHT["origin"]]})
    await edge.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
            path, allowed = "/v1/chat/completions", "access-control-allow-origin"
            asked = await client.options(path, headers=PREFLIGHT)
            assert (asked.status_code, asked.headers[allowed]) == (200, PREFLIGHT["origin"])
            assert "authorization" in asked.headers["access-control-allow-headers"]
            origin = {"origin": PREFLIGHT["origin"]}
            answer = await client.post(path, headers={**BEARER, **origin}, content=b"{}")
            assert (answer.status_code, answer.headers[allowed]) == (200, PREFLIGHT["origin"])
            # A page can read why it was refused.
            refused = await client.post(path, headers={"x-api-key": "mr-wrong", **origin}, content=b"{}")
            assert (refused.status_code, refused.headers[allowed]) == (401, PREFLIGHT["origin"])
            # Neither is a refusal of Envoy's own opaque to it.
            for headers, content, status in (({}, b"{}", 401), (BEARER, bytes(MAX_BODY_BYTES + 1), 413)):
                refused = await client.post(path, headers={**headers, **origin}, content=content)
                assert (refused.status_code, refused.headers[allowed]) == (status, PREFLIGHT["origin"])
                assert refused.headers["access-control-expose-headers"] == "*"
                assert refused.json()["error"]["message"]
            elsewhere = {"origin": "https://other.example.com"}
            other = await client.options(path, headers={**PREFLIGHT, **elsewhere})
            assert allowed not in other.headers
            other = await client.post(path, headers=elsewhere, content=b"{}")
            assert (other.status_code, allowed in other.headers) == (401, False)
    finally:
        await edge.stop()


async def test_pages_may_not_call_unless_configured(client: httpx.AsyncClient) -> None:
    asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (asked.status_code, "access-control-allow-origin" in asked.headers) == (401, False)


async def test_too_many_streams_are_said_in_both_forms(tmp_path: Path) -> None:
    edge = Edge(tmp_path, envoy={"max_requests": 1})
    await edge.start()
    try:
        async with (
            grpc.aio.insecure_channel(edge.address) as channel,
            httpx.AsyncClient(base_url=f"http://{edge.address}") as client,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            running = stub.Chat(inference_pb2.ChatRequest(), metadata=tuple(BEARER.items()))
            edge.faces.items.put_nowait("one")
            await running.read()
            # Authorization still answers: it is not in the way of streams, nor they in its.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Chat(inference_pb2.ChatRequest(), metadata=tuple(BEARER.items())).read()
            assert "limit of connections or requests" in (caught.value.details() or "")
            async with client.stream("GET", "/events", headers=BEARER) as events:
                assert events.status_code == 200
                response = await client.get("/v1/models", headers=BEARER)
                assert (response.status_code, response.headers["retry-after"]) == (429, "1")
                assert response.json()["error"]["reason"] == "QUEUE_LIMIT_EXCEEDED"
                edge.faces.items.put_nowait(None)
                edge.faces.items.put_nowait(None)
    finally:
        await edge.stop()


async def test_upgrade_to_a_websocket_is_an_openai_error(edge: Edge) -> None:
    host, _, port = edge.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /v1/realtime HTTP/1.1\r\nhost: edge\r\nauthorization: {BEARER['authorization']}\r\n"
        "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    writer.close()
    assert head.startswith(b"http/1.1 400 ")
    assert b"content-type: application/json" in head
    assert (error["reason"], error["type"]) == ("MALFORMED_BODY", "invalid_request_error")
    assert "WebSocket" in error["message"]


async def test_proxies_in_front_may_speak_http_1_0(edge: Edge) -> None:
    reader, writer = await asyncio.open_connection(*edge.address.split(":"))
    bearer = BEARER["authorization"].encode()
    writer.write(b"GET /x HTTP/1.0\r\nhost: a\r\nauthorization: " + bearer + b"\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"chunked" not in head
    assert json.loads(body)["headers"]["x-millrace-context"]
    writer.close()
    await writer.wait_closed()


async def test_metrics_of_the_gateway_are_not_public(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers=BEARER)
    assert (response.status_code, response.json()["error"]["reason"]) == (404, "ROUTE_NOT_FOUND")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.0\r\nconnection: keep-alive\r\nAuthorization: Bearer x\r\n"
        b"Transfer-Encoding:   Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["no host", "transfer coding", "1.0 chunked", "1.0 chunked and kept alive", "1.0 chunked GET"],
)
async def test_malformed_http_is_an_openai_error(edge: Edge, request_bytes: bytes) -> None:
    reader, writer = await asyncio.open_connection(*edge.address.split(":"))
    writer.write(request_bytes)
    answer = await reader.read()
    assert answer.split(b" ", 2)[:2] in ([b"HTTP/1.1", b"400"], [b"HTTP/1.0", b"400"])
    assert b'"reason":"MALFORMED_BODY"' in answer
    writer.close()
    await writer.wait_closed()
