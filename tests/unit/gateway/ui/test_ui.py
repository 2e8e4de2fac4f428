"""The page's files and the endpoints behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.ui import files
from observability.emit.names import Cause, TtftPart
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context

PAGE_LIMIT_BYTES = 200_000
PRICED: dict[str, Any] = {"prices": {"tiny": {"prompt": 2.0, "cached_prompt": 1.0, "completion": 3.0}}}


async def ask(rig: Deployment, path: str, **headers: str) -> httpx.Response:
    """Without a key, which the rig's own client has."""
    async with httpx.AsyncClient(base_url=rig.http.base_url) as client:
        return await client.get(path, headers=headers)


def test_the_page_is_small_and_asks_no_other_host() -> None:
    found = [path for path in sorted(files._FOLDER.iterdir()) if path.is_file()]
    assert sum(path.stat().st_size for path in found) <= PAGE_LIMIT_BYTES
    for path in found:
        text = path.read_text(encoding="utf-8")
        # An XML namespace is a name and no address.
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        if path.name != "markdown.js":
            assert "http://" not in text, path.name
            assert "https://" not in text, path.name
        if path.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


@pytest.mark.parametrize(
    "word", [*(f"part_{each}" for each in TtftPart), *(f"cause_{each}" for each in Cause)]
)
def test_every_part_and_every_cause_has_a_word_in_every_language(word: str) -> None:
    words = (files._FOLDER / "i18n.js").read_text(encoding="utf-8")
    assert words.count(f" {word}: ") == words.count(" part_sum: ") == 3


async def test_files_need_no_key_and_are_kept_by_clients() -> None:
    async with deployed() as rig:
        moved = await ask(rig, "/ui")
        assert (moved.status_code, moved.headers["location"]) == (308, "ui/")
        page = await ask(rig, "/ui/")
        assert page.status_code == 200
        assert page.headers["cache-control"] == "no-cache"
        assert page.headers["content-security-policy"] == files.POLICY
        assert "unsafe" not in files.POLICY
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert len(named) >= 3
        for name in named:
            file = await ask(rig, f"/ui/{name}")
            assert file.status_code == 200, name
            assert "immutable" in file.headers["cache-control"]
            assert file.headers["x-content-type-options"] == "nosniff"
            known = {"if-none-match": file.headers["etag"]}
            assert (await ask(rig, f"/ui/{name}", **known)).status_code == 304
        plain = await ask(rig, "/ui/", **{"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == page.text
        assert plain.headers["etag"] != page.headers["etag"]


@pytest.mark.parametrize(
    "path", ["/ui/nothing", "/ui/../gateway/app.py", "/ui/%2e%2e/files.py", "/v1/account"]
)
async def test_whatever_else_is_asked_for_needs_a_key(path: str) -> None:
    async with deployed() as rig:
        assert (await ask(rig, path)).status_code == 401


async def test_an_account_is_told_what_its_key_may_do() -> None:
    async with deployed(tables={"gateway": PRICED}) as rig:
        account = (await rig.http.get("/v1/account")).json()
        assert account["tenant"] == "acme"
        assert account["tiers"][0]["name"] == "standard"
        assert account["prices"]["tiny"] == {"prompt": 2.0, "cached_prompt": 1.0, "completion": 3.0}
        assert (account["keeps_conversations"], account["is_operator"]) == (False, False)
        strange = await rig.http.get("/v1/account?x=1")
        assert (strange.status_code, strange.json()["error"]["param"]) == (400, "x")


async def test_usage_is_that_of_the_keys_tenant_alone(tmp_path: Path) -> None:
    ledger = {"url": f"sqlite:///{tmp_path / 'ledger.sqlite'}", "flush_entries": 1}
    async with deployed(tables={"gateway": {"ledger": ledger, **PRICED}}) as rig:
        answer = (await rig.chat()).json()
        usage = answer["usage"]
        table: dict[str, Any] = {}
        # A thread writes the ledger.
        while not table.get("data"):
            table = (await rig.http.get("/v1/usage?by=model")).json()
        (row,) = table["data"]
        assert table["is_kept"] is True
        assert row["group"] == answer["model"]
        assert row["num_requests"] == 1
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert row["cached_prompt_tokens"] == cached
        assert row["computed_prompt_tokens"] == usage["prompt_tokens"] - cached
        assert row["completion_tokens"] == usage["completion_tokens"]
        wanted = (2 * row["computed_prompt_tokens"] + cached + 3 * row["completion_tokens"]) / 1e6
        assert row["cost"] == pytest.approx(wanted)
        assert (await rig.http.get("/v1/usage?since=4294967296")).json()["data"] == []
        foreign = await ask(rig, "/v1/usage", **{CONTEXT_HEADER: signed_context(tenant="other")})
        assert foreign.json()["data"] == []
        for by in ("tenant", ""):
            wrong = await rig.http.get(f"/v1/usage?by={by}")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "by")


async def test_operators_alone_see_what_runs() -> None:
    async with deployed() as rig:
        refused = await rig.http.get("/v1/status")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "TENANT_NOT_ALLOWED")
    async with deployed(tables={"gateway": {"admin_tenants": ["acme"]}}) as rig:
        assert (await rig.http.get("/v1/account")).json()["is_operator"] is True
        before = (await rig.http.get("/v1/status")).json()
        usage = (await rig.chat()).json()["usage"]
        after = (await rig.http.get("/v1/status")).json()
        assert after["gateway"] == before["gateway"]
        then, now = (
            next(each for each in page["tiers"] if each["name"] == "standard") for page in (before, after)
        )
        assert now["num_requests"] == then["num_requests"] + 1
        assert now["completion_tokens"] == then["completion_tokens"] + usage["completion_tokens"]
        bound, count = now["ttft_buckets"][-1]
        assert (bound, count) == (None, 1)
        (engine,) = after["engines"]
        assert (engine["state"], engine["model"]) == ("ready", "tiny")


async def test_an_answer_says_what_delayed_it() -> None:
    async with deployed() as rig:
        usage = (await rig.chat(include_timing=True)).json()["usage"]
        assert isinstance(usage["timings"]["delayed_by_ms"], dict)
        parts = usage["time_to_first_token"]
        assert sum(ms for name, ms in parts.items() if name != "total_ms") == pytest.approx(parts["total_ms"])
