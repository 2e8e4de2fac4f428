"""A path of its own is not taken for the parameter of another one."""

from __future__ import annotations

import pytest

from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context


@pytest.mark.parametrize("path", ["compact", "input_tokens"])
@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "DELETE"])
async def test_a_path_of_its_own_tells_its_own_methods(path: str, method: str) -> None:
    async with deployed() as stack:
        answer = await stack.http.request(method, f"/v1/responses/{path}")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"
        # What is none goes on being an id.
        other = await stack.http.put(f"/v1/responses/{path}_", headers={CONTEXT_HEADER: signed_context("b")})
        assert other.headers["allow"] == "GET, DELETE"
