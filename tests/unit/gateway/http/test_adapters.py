"""Operators add and remove adapters over HTTP, on all engines of a model or on none; nobody else does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine

ADMIN = {"gateway": {"admin_tenants": ["acme"]}}


async def load(stack: Deployment, name: str, path: str) -> httpx.Response:
    return await stack.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(stack: Deployment, name: str) -> httpx.Response:
    return await stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": None})


async def listed(stack: Deployment) -> list[tuple[str, str, str]]:
    page = (await stack.http.get("/v1/lora_adapters")).json()
    return [(each["id"], each["parent"], each["root"]) for each in page["data"]]


def told(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_an_adapter_is_added_asked_for_and_removed() -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b")]
    async with deployed(*engines, tables=ADMIN) as stack:
        added = await load(stack, "poet", "/adapters/poet")
        assert (added.status_code, added.json()) == (200, {"message": "adapter tiny:poet is served"})
        assert [each.paths for each in engines] == [{"poet": "/adapters/poet"}] * 2
        assert await listed(stack) == [("tiny:poet", "tiny", "/adapters/poet")]
        while (answered := await stack.chat(model="tiny:poet")).status_code == 404:
            # Engines tell with their steps.
            await stack.chat()
        assert answered.json()["model"] == "tiny:poet"
        # By the name of the model, too.
        assert (await unload(stack, "tiny:poet")).status_code == 200
        assert (await listed(stack), [each.paths for each in engines]) == ([], [{}, {}])
        gone = await unload(stack, "poet")
        assert (gone.status_code, told(gone)["reason"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("former", ["", "/adapters/first"])
async def test_what_one_engine_refuses_is_added_to_none(former: str) -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b", unreadable=("/adapters/new",))]
    async with deployed(*engines, tables=ADMIN) as stack:
        if former:
            assert (await load(stack, "poet", former)).status_code == 200
        refused = await load(stack, "poet", "/adapters/new")
        assert (refused.status_code, told(refused)["message"]) == (
            400,
            "path: b finds nothing at /adapters/new",
        )
        assert [each.paths for each in engines] == [{"poet": former} if former else {}] * 2


async def test_other_tenants_change_nothing() -> None:
    engine = ScriptedEngine()
    async with deployed(engine) as stack:
        calls = [
            await load(stack, "poet", "/adapters/poet"),
            await unload(stack, "poet"),
            await stack.http.get("/v1/lora_adapters"),
        ]
        for refused in calls:
            assert (refused.status_code, told(refused)["reason"]) == (403, "TENANT_NOT_ALLOWED")
            assert "gateway.admin_tenants" in told(refused)["message"]
        assert not engine.paths


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "other:poet", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "tiny:", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "poet"}, "lora_path"),
        ({"lora_name": "poet", "lora_path": 1}, "lora_path"),
        ({"lora_name": "poet", "lora_path": "/p", "rank": 8}, "rank"),
    ],
)
async def test_a_bad_body_names_its_field(body: dict[str, Any], field: str) -> None:
    async with deployed(tables=ADMIN) as stack:
        refused = await stack.http.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 400
        assert field in told(refused)["message"] or field == told(refused)["param"]
