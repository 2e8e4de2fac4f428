"""Engines that die, refuse or come back: the client reads one unbroken stream."""

from __future__ import annotations

import asyncio
from typing import Any

from services.errors import MillraceError, Reason
from tests.unit.gateway.rig.deployment import deployed, serve_engine
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode

STORY = "once upon a time there was a gateway that lost its engine"


def story(submit: Any, choice: int) -> list[int]:
    """Depends on seed and choice, as sampling does."""
    return [*encode(f"{submit.sampling.seed % 1000} {choice} {STORY}"), END_ID]


async def test_stream_goes_on_where_the_lost_engine_stopped() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=20)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other) as stack:
        bodies = [(await stack.chat(seed=7, logprobs=True)).json() for _ in range(2)]
        for body in bodies:
            choice = body["choices"][0]
            assert choice["message"]["content"] == f"7 0 {STORY}"
            assert choice["finish_reason"] == "stop"
            assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"]
            assert body["usage"]["completion_tokens"] == len(f"7 0 {STORY}") + 1
        resumed = [submit for submit in other.submissions if submit.output_token_ids]
        assert [bytes(submit.output_token_ids) for submit in resumed] == [f"7 0 {STORY}"[:20].encode()]
        assert resumed[0].sampling.seed == 7


async def test_every_choice_that_has_not_ended_is_continued_alone() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=100)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other) as stack:
        for _ in range(2):
            body = (await stack.chat(n=3, seed=5)).json()
            texts = [choice["message"]["content"] for choice in body["choices"]]
            assert texts == [f"5 {index} {STORY}" for index in range(3)]
        resumed = [submit for submit in other.submissions if submit.sampling.n == 1]
        assert [submit.choice_index for submit in resumed] == [1, 2]


async def test_without_a_seed_one_is_chosen_and_kept() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=10)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other) as stack:
        for _ in range(2):
            content = (await stack.chat()).json()["choices"][0]["message"]["content"]
            assert content.endswith(STORY)
        resumed = {submit.sampling.seed for submit in other.submissions if submit.output_token_ids}
        assert len(resumed) == 1
        assert resumed <= {submit.sampling.seed for submit in dying.submissions}


async def test_the_only_engine_may_come_back() -> None:
    engine = ScriptedEngine(reply=story, dies_after_tokens=10)
    async with deployed(engine) as stack:
        body = (await stack.chat(seed=1)).json()
        assert body["choices"][0]["message"]["content"] == f"1 0 {STORY}"


async def test_engine_that_stays_away_ends_the_request_clearly() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x" * 50))
    tables = {"gateway": {"routing": {"continuation_wait_s": 0.2}}}
    async with deployed(engine, tables=tables) as stack:
        engine.gate.clear()
        answer = asyncio.create_task(stack.chat())
        while not engine.submissions:
            await asyncio.sleep(0.01)
        await stack.engine_servers[0].stop(0)
        response = await answer
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "ENGINE_LOST"
        assert "retry-after" in response.headers
        refused = await stack.chat()
        assert refused.json()["error"]["code"] == "ENGINE_UNAVAILABLE"
        assert (await stack.http.get("/health")).status_code == 503


async def test_losses_are_bounded() -> None:
    engines = [
        ScriptedEngine(name=str(index), reply=lambda submit, choice: encode("x" * 90), dies_after_tokens=5)
        for index in range(4)
    ]
    tables = {"gateway": {"routing": {"max_continuations": 2}}}
    async with deployed(*engines, tables=tables) as stack:
        response = await stack.chat()
        assert response.json()["error"]["code"] == "ENGINE_LOST"
        assert sum(len(engine.submissions) for engine in engines) == 3


async def test_a_draining_engine_is_avoided() -> None:
    draining = ScriptedEngine(refusal=MillraceError(Reason.DRAINING, "going away"))
    async with deployed(draining, ScriptedEngine()) as stack:
        for _ in range(2):
            assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "hello 0"


async def test_refusal_of_the_engine_reaches_the_client() -> None:
    engine = ScriptedEngine(
        refusal=MillraceError(Reason.NEVER_FITS, "needs 900 blocks, there are 100", field="prompt")
    )
    async with deployed(engine) as stack:
        response = await stack.chat()
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "NEVER_FITS"


async def test_engine_with_another_vocabulary_is_never_used() -> None:
    odd = ScriptedEngine(name="odd", fingerprint="0" * 64)
    async with deployed(odd, ScriptedEngine()) as stack:
        for _ in range(3):
            assert (await stack.chat()).status_code == 200
        assert not odd.submissions
        states = {str(each.state) for each in stack.gateway.fleet.attachments}
        assert "ready" in states


async def test_requests_spread_over_engines() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with deployed(*engines) as stack:
        for _ in range(4):
            await stack.chat()
        assert [len(engine.submissions) for engine in engines] == [2, 2]


async def test_engines_in_a_file_come_and_go(tmp_path: Any) -> None:
    listing = tmp_path / "engines"
    first = ScriptedEngine(name="first")
    server = await serve_engine(first)
    listing.write_text(f"# engines\n127.0.0.1:{server.port}\n")
    tables = {"gateway": {"discovery": f"file:{listing}", "discovery_interval_s": 0.05}}
    async with deployed(tables=tables) as stack:
        await stack.chat()
        assert len(first.submissions) == 1
        second = ScriptedEngine(name="second")
        second_server = await serve_engine(second)
        listing.write_text(f"127.0.0.1:{second_server.port}\n")
        while not second.submissions:
            assert (await stack.chat()).status_code in (200, 503)
    await server.stop(0)
    await second_server.stop(0)
