"""An error is written in the form of the face that owns the path, whoever in front of the face finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import pytest_asyncio
from envoy_api.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy_api.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

from gateway.auth.authorizer import CONTENT_TYPE_HEADER, QUESTION_HEADER
from gateway.limits.servicer import CONTENT_TYPE_ENTRY, KEY_ENTRY, PATH_ENTRY, TENANT_ENTRY
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.error_form import FORMS, PREFIX, reason_in_other_form

from .serving import answer

# A body in an error's form, with its headers.
Written = tuple[bytes, dict[str, str]]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Deployment]:
    limited = {"tenant": {"requests_per_minute": 1}}
    async with deployed(error_forms=FORMS, tables=limited) as running:
        yield running


async def asked_by_envoy(stack: Deployment, path: str, content_type: str = "application/json") -> Written:
    """The authorizer refuses."""
    headers = {QUESTION_HEADER: "1", CONTENT_TYPE_HEADER: content_type}
    response = await stack.http.get(f"/edge/authorize{path}", headers=headers)
    assert response.status_code == 401
    return response.content, dict(response.headers)


async def over_the_limit(stack: Deployment, path: str, content_type: str = "application/json") -> Written:
    """The rate limit service refuses."""
    entries = {TENANT_ENTRY: "acme", KEY_ENTRY: "k1", PATH_ENTRY: path, CONTENT_TYPE_ENTRY: content_type}
    descriptor = ratelimit_pb2.RateLimitDescriptor(
        entries=[ratelimit_pb2.RateLimitDescriptor.Entry(key=key, value=entries[key]) for key in entries]
    )
    service = rls_pb2_grpc.RateLimitServiceStub(stack.channel)
    while True:
        told = await service.ShouldRateLimit(rls_pb2.RateLimitRequest(descriptors=[descriptor]))
        if told.overall_code == rls_pb2.RateLimitResponse.OVER_LIMIT:
            return told.raw_body, {each.key: each.value for each in told.response_headers_to_add}


async def no_http(stack: Deployment, path: str) -> Written:
    """The connection refuses what is no HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
    writer.write(b"GET %b HTTP/1.1\r\nno header\r\n\r\n" % path.encode())
    status, headers, body = await answer(reader)
    writer.close()
    assert status == 400
    return body, headers


async def without_credentials(stack: Deployment, path: str) -> Written:
    """The application refuses who does not say who asks."""
    response = await stack.http.get(path, headers={CONTEXT_HEADER: "forged"})
    assert response.status_code == 401
    return response.content, dict(response.headers)


async def unknown_path(stack: Deployment, path: str) -> Written:
    """The application has no such route."""
    response = await stack.http.get(path)
    assert response.status_code == 404
    return response.content, dict(response.headers)


REFUSALS: list[tuple[Callable[[Deployment, str], Awaitable[Written]], str]] = [
    (asked_by_envoy, "MISSING_CREDENTIALS"),
    (over_the_limit, "REQUEST_RATE_EXCEEDED"),
    (no_http, "MALFORMED_BODY"),
    (without_credentials, "CONTEXT_SIGNATURE_INVALID"),
    (unknown_path, "ROUTE_NOT_FOUND"),
]


@pytest.mark.parametrize(("refuse", "reason"), REFUSALS)
async def test_a_path_has_the_errors_of_its_face(
    stack: Deployment, refuse: Callable[[Deployment, str], Awaitable[Written]], reason: str
) -> None:
    body, headers = await refuse(stack, f"{PREFIX}/messages?x=1")
    assert reason_in_other_form(body) == reason
    assert headers["content-type"] == "application/other+json"
    assert headers["x-other-error"]
    # Other paths have OpenAI's, as before.
    body, headers = await refuse(stack, "/v1/nothing")
    assert msgspec.json.decode(body)["error"]["reason"] == reason
    assert headers["content-type"] == "application/json"
    assert "x-other-error" not in headers


@pytest.mark.parametrize("refuse", [asked_by_envoy, over_the_limit])
async def test_grpc_has_its_own_form_on_every_path(
    stack: Deployment, refuse: Callable[[Deployment, str, str], Awaitable[Written]]
) -> None:
    body, headers = await refuse(stack, PREFIX, "application/grpc+proto")
    assert not body.startswith(b"{")
    assert headers["grpc-status-details-bin"]


async def test_the_time_that_it_took_is_in_the_faces_own_header(stack: Deployment) -> None:
    for path, name, other in (
        (PREFIX, "x-other-elapsed", "openai-processing-ms"),
        ("/health", "openai-processing-ms", "x-other-elapsed"),
    ):
        headers = (await stack.http.get(path)).headers
        assert int(headers[name]) >= 0
        assert other not in headers
