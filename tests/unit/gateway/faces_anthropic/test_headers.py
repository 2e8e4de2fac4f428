"""Headers of Anthropic's API: versions, keys, limits and ids."""

from __future__ import annotations

import pytest

from gateway.auth.directory import hash_key
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed

from .test_messages import BODY, PATH


async def test_limits_are_told_in_the_apis_headers() -> None:
    async with deployed(tables={"tenant": {"tokens_per_minute": 5000}}) as stack:
        headers = (await stack.http.post(PATH, json=BODY)).headers
        assert headers["anthropic-ratelimit-tokens-limit"] == "5000"
        assert 0 < int(headers["anthropic-ratelimit-tokens-remaining"]) < 5000


async def test_a_limit_that_was_reached_is_told_in_them_too() -> None:
    entries = [{"id": "k1", "tenant": "acme", "hash": hash_key("mr-key"), "requests_per_minute": 1}]
    async with deployed(tables={"keys": {"entries": entries}}) as stack:
        stack.http.headers.pop(CONTEXT_HEADER)
        answers = [await stack.http.post(PATH, json=BODY, headers={"x-api-key": "mr-key"}) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    headers = answers[1].headers
    assert headers["anthropic-ratelimit-requests-limit"] == "1"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert int(headers["retry-after"]) > 0


async def test_a_key_comes_in_the_apis_own_header() -> None:
    entries = [{"id": "k1", "tenant": "acme", "hash": hash_key("mr-key")}]
    async with deployed(tables={"keys": {"entries": entries}}) as stack:
        stack.http.headers.pop(CONTEXT_HEADER)
        for key, status in (("mr-key", 200), ("mr-nobody", 401), ("", 401)):
            asked = {"x-api-key": key, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
            response = await stack.http.post(f"{PATH}?beta=true", json=BODY, headers=asked)
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("credentials", [{}, {"authorization": "Basic bXI="}, {CONTEXT_HEADER: ""}])
async def test_a_401_advises_first_what_the_apis_clients_send(credentials: dict[str, str]) -> None:
    async with deployed() as stack:
        stack.http.headers.pop(CONTEXT_HEADER)
        for path in (PATH, f"{PATH}/count_tokens", f"{PATH}/batches", f"{PATH}/batches/msgbatch_1"):
            told = (await stack.http.get(path, headers=credentials)).json()["error"]["message"]
            assert "`x-api-key: <key>`, or `authorization: Bearer <key>`" in told
            assert told.count("authorization: Bearer") == 1
        # An API whose clients send it otherwise does not name that.
        told = (await stack.http.get("/v1/models", headers=credentials)).json()["error"]["message"]
        assert "`authorization: Bearer <key>`" in told
        assert "x-api-key" not in told


@pytest.mark.parametrize(
    ("method", "path"), [("POST", PATH), ("POST", f"{PATH}/count_tokens"), ("GET", "/v1/models")]
)
async def test_a_version_that_is_none_is_refused_and_newer_ones_are_taken(method: str, path: str) -> None:
    body = None if method == "GET" else {key: BODY[key] for key in ("model", "messages")}
    if path == PATH:
        body = BODY
    async with deployed() as stack:
        for version in (None, "2023-06-01", "2023-01-01", "2026-10-21"):
            headers = {"anthropic-version": version} if version else {}
            answer = await stack.http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            if version is not None or method == "POST":
                assert answer.headers["request-id"] == answer.headers["x-request-id"] == "request-1"
        for version in ("2022-12-31", "2023-13-01", "20230601", "2023-06-01, 2023-06-01", "", "latest"):
            headers = {"anthropic-version": version}
            refused = await stack.http.request(method, path, json=body, headers=headers)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["type"], error["details"]["field"]) == (
                "invalid_request_error",
                "anthropic-version",
            )
            assert error["message"].startswith(f'anthropic-version: "{version}" is not a valid version')
            assert "send 2023-06-01" in error["message"]
            assert refused.headers["request-id"] == "request-1"
