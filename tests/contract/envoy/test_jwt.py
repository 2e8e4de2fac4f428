"""Tokens of an identity provider: verified by the real Envoy, mapped to tenants by the gateway."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from .edge import GOOD_KEY, Edge, verified

pytestmark = pytest.mark.asyncio(loop_scope="module")

ISSUER = "https://id.example"
SIGNING_KEY = b"k" * 32


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


JWKS = json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "one", "k": _base64url(SIGNING_KEY)}]})


def token(signing_key: bytes = SIGNING_KEY, **claims: Any) -> str:
    """A JWT (RFC 7519) with HMAC-SHA256."""
    head = _base64url(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "one"}).encode())
    standard = {"iss": ISSUER, "aud": "millrace", "sub": "user-1", "exp": int(time.time()) + 60}
    body = _base64url(json.dumps({**standard, **claims}).encode())
    signature = hmac.digest(signing_key, f"{head}.{body}".encode(), hashlib.sha256)
    return f"{head}.{body}.{_base64url(signature)}"


@pytest.fixture(scope="module")
def key_server() -> Iterator[str]:
    """The issuer's keys over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(JWKS.encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/keys"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["file", "url"])
async def client(
    request: pytest.FixtureRequest, key_server: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    folder = Path(tmp_path_factory.mktemp("jwt"))
    (folder / "jwks.json").write_text(JWKS)
    source = {"jwks_url": key_server} if request.param == "url" else {"jwks_file": f"{folder}/jwks.json"}
    jwt = {
        "issuer": ISSUER,
        "audiences": ["millrace"],
        **source,
        "tenant_claim": "org",
        "tier_claim": "plan",
        "tenants": {"org-7": "acme"},
    }
    edge = Edge(folder, keys={"jwt": jwt})
    await edge.start()
    async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
        yield client
    await edge.stop()


async def get(client: httpx.AsyncClient, credential: str, **headers: str) -> httpx.Response:
    return await client.get("/v1/models", headers={"authorization": f"Bearer {credential}", **headers})


async def test_valid_token_becomes_an_identity(client: httpx.AsyncClient) -> None:
    response = await get(client, token(org="org-7", plan="batch"))
    headers = response.json()["headers"]
    identity, _ = verified(headers["x-millrace-context"])
    assert (identity.tenant, identity.key_id, identity.tier) == ("acme", "jwt:user-1", "batch")
    # The token ends at Envoy, which tells its claims.
    assert "authorization" not in headers


async def test_api_keys_still_work(client: httpx.AsyncClient) -> None:
    assert (await get(client, GOOD_KEY)).status_code == 200


@pytest.mark.parametrize(
    "bad",
    [
        token(b"x" * 32, org="org-7"),
        token(org="org-7", exp=int(time.time()) - 3600),
        token(org="org-7", iss="https://other.example"),
        token(org="org-7", aud="other"),
        "not.a.token",
    ],
)
async def test_token_that_is_not_valid_is_refused(client: httpx.AsyncClient, bad: str) -> None:
    response = await get(client, bad)
    assert (response.status_code, response.json()["error"]["reason"]) == (401, "INVALID_CREDENTIALS")


async def test_a_token_in_the_path_is_not_read(client: httpx.AsyncClient) -> None:
    # Logs and traces show paths.
    response = await client.get("/v1/models", params={"access_token": token(org="org-7")})
    assert (response.status_code, response.json()["error"]["reason"]) == (401, "MISSING_CREDENTIALS")


async def test_claims_cannot_be_brought_along(client: httpx.AsyncClient) -> None:
    forged = {"x-millrace-jwt-claims": _base64url(json.dumps({"org": "acme"}).encode())}
    assert (await get(client, "not.a.token", **forged)).status_code == 401
    response = await get(client, token(org="nobody"), **forged)
    assert (response.status_code, response.json()["error"]["reason"]) == (403, "TENANT_NOT_ALLOWED")


async def test_tier_beyond_the_agreement_is_forbidden(client: httpx.AsyncClient) -> None:
    response = await get(client, token(org="limited", plan="standard"))
    assert (response.status_code, response.json()["error"]["reason"]) == (403, "TIER_NOT_ALLOWED")
