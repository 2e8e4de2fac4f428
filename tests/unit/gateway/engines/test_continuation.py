"""Engines that die, refuse or come back: the client reads one unbroken stream."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from millrace.common.v1 import context_pb2

from contract.errors import MillraceError, Reason
from gateway.engines import fleet
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


async def test_prompt_is_told_about_though_another_choice_had_begun_before_the_engine_was_lost() -> None:
    class SecondFirst(ScriptedEngine):
        async def _serve(self, submit: Any, outputs: Any) -> None:
            for choice in (1, 0):
                await self._serve_choice(submit, choice, outputs)

    body = {"model": "tiny", "prompt": "abc", "n": 2, "max_tokens": 5, "echo": True, "logprobs": 0, "seed": 5}
    dying = SecondFirst(name="dying", reply=story, dies_after_tokens=3)
    async with deployed(dying, ScriptedEngine(name="other", reply=story)) as stack:
        while not dying.submissions:
            answer = await stack.http.post("/v1/completions", json=body)
        for index, choice in enumerate(answer.json()["choices"]):
            assert choice["text"] == f"abc5 {index} o"
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


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
        assert response.json()["error"]["reason"] == "ENGINE_LOST"
        assert "retry-after" in response.headers
        refused = await stack.chat()
        assert refused.json()["error"]["reason"] == "ENGINE_UNAVAILABLE"
        assert (await stack.http.get("/health")).status_code == 503


async def test_without_engines_a_gateway_that_scales_from_zero_is_asked_and_wants_one() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x"))
    tables = {"gateway": {"autoscaling": {"from_zero": True}}}
    async with deployed(engine, tables=tables) as stack:
        assert stack.gateway.fleet.wanted_engines() == {}
        await stack.engine_servers[0].stop(0)
        while stack.gateway.fleet.ready:
            await asyncio.sleep(0.01)
        refused = await stack.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["reason"] == "ENGINE_UNAVAILABLE"
        assert "retry-after" in refused.headers
        assert (await stack.http.get("/health")).status_code == 200
        ((model, pool), wanted) = next(iter(stack.gateway.fleet.wanted_engines().items()))
        assert (model, pool) != ("", "")
        assert 0 < wanted <= 1
        while "millrace_engines_wanted{" not in (await stack.http.get("/metrics")).text:
            await asyncio.sleep(0.05)


async def test_losses_are_bounded() -> None:
    engines = [
        ScriptedEngine(name=str(index), reply=lambda submit, choice: encode("x" * 90), dies_after_tokens=5)
        for index in range(4)
    ]
    tables = {"gateway": {"routing": {"max_continuations": 2}}}
    async with deployed(*engines, tables=tables) as stack:
        response = await stack.chat()
        assert response.json()["error"]["reason"] == "ENGINE_LOST"
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
        assert response.json()["error"]["reason"] == "NEVER_FITS"


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


async def test_the_loss_of_one_engine_is_one_loss_for_all_choices() -> None:
    # The second engine takes three choices, each on its own, and dies; the first is back then.
    engines = [
        ScriptedEngine(name="first", reply=story, dies_after_tokens=30),
        ScriptedEngine(name="second", reply=story, dies_after_tokens=40),
    ]
    tables = {"gateway": {"routing": {"max_continuations": 2}}}
    async with deployed(*engines, tables=tables) as stack:
        body = (await stack.chat(n=3, seed=5)).json()
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == [f"5 {index} {STORY}" for index in range(3)]
        assert body["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
        resubmitted = 'millrace_resubmissions_total{outcome="continued"}'
        exposed = (await stack.http.get("/metrics")).text
        (line,) = [each for each in exposed.splitlines() if each.startswith(resubmitted)]
        assert float(line.split()[-1]) == 2


async def test_choices_on_two_engines_are_both_taken_back() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=5)
    others = [ScriptedEngine(name=name, reply=story, step_s=0.01) for name in ("left", "right")]
    async with deployed(dying, *others) as stack:
        body = {"model": "tiny", "stream": True, "n": 4, "messages": [{"role": "user", "content": "hi"}]}
        while not dying.submissions:
            async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if all(engine.num_running for engine in others):
                        break
        for engine in others:
            while engine.num_running:
                engine.changed.clear()
                await asyncio.wait_for(engine.changed.wait(), 10)
        assert all(
            any(submit.output_token_ids or submit.choice_index for submit in each.submissions)
            for each in others
        )


async def test_engine_lost_before_the_first_token_is_asked_again_for_everything() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=0)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other) as stack:
        for _ in range(2):
            body = {
                "model": "tiny",
                "prompt": "abcd",
                "echo": True,
                "logprobs": 0,
                "max_tokens": 8,
                "seed": 3,
            }
            answer = (await stack.http.post("/v1/completions", json=body)).json()
            logprobs = answer["choices"][0]["logprobs"]
            # The first token of a prompt has none.
            assert logprobs["token_logprobs"] == [None, *[-0.25] * 3, *[-0.5] * 8]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_grammar_and_adapter_go_to_the_next_engine_too() -> None:
    # Each adapter has an engine that it goes to first; of so many, one goes to the engine that dies.
    poets = tuple(f"poet-{number}" for number in range(64))
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=9, adapters=poets)
    other = ScriptedEngine(name="other", reply=story, adapters=poets)
    async with deployed(dying, other) as stack:
        for poet in poets:
            format_ = {"type": "json_object"}
            body = (await stack.chat(model=f"tiny:{poet}", seed=1, response_format=format_)).json()
            assert body["choices"][0]["message"]["content"] == f"1 0 {STORY}"
            if dying.submissions:
                break
        (resumed,) = [submit for submit in other.submissions if submit.output_token_ids]
        assert resumed.grammar.payload == b"grammar"
        assert resumed.adapter == poet
        assert resumed.sampling == dying.submissions[0].sampling


async def test_best_of_begins_again_because_nothing_was_told() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=9)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other) as stack:
        for options in ({"best_of": 3}, {"beam_width": 3, "temperature": 0}):
            dying.dies_after_tokens = 9
            before = len(other.submissions)
            while len(dying.submissions) == 0 or dying.dies_after_tokens >= 0:
                assert (await stack.chat(seed=1, **options)).status_code == 200
            again = other.submissions[before:]
            assert dying.submissions[-1].sampling in [submit.sampling for submit in again]
            assert not any(submit.output_token_ids for submit in again)


async def test_a_continuation_is_not_refused_for_its_wait() -> None:
    dying = ScriptedEngine(name="dying", reply=story, dies_after_tokens=9)
    other = ScriptedEngine(name="other", reply=story)
    async with deployed(dying, other, tables={"tier": {"queue_limit_ms": 700}}) as stack:
        for _ in range(2):
            assert (await stack.chat(seed=1)).status_code == 200
        contexts = {
            bool(submit.output_token_ids): context_pb2.RequestContext.FromString(submit.context.payload)
            for submit in (*dying.submissions, *other.submissions)
        }
        assert contexts[False].queue_limit_ms == 700
        assert not contexts[True].HasField("queue_limit_ms")


async def test_client_that_leaves_while_no_engine_is_there_gives_everything_back() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x" * 50))
    tables = {"gateway": {"routing": {"continuation_wait_s": 600.0}}}
    async with deployed(engine, tables=tables) as stack:
        engine.gate.clear()
        answer = asyncio.create_task(stack.chat())
        while not engine.submissions:
            await asyncio.sleep(0.01)
        await stack.engine_servers[0].stop(0)
        while stack.gateway.fleet.ready:
            await asyncio.sleep(0.01)
        assert stack.gateway.num_open == 1
        answer.cancel()
        async with asyncio.timeout(20):
            while stack.gateway.num_open:
                await asyncio.sleep(0.01)


async def test_engine_with_another_model_is_never_used() -> None:
    odd = ScriptedEngine(name="odd", model="other")
    async with deployed(odd, ScriptedEngine()) as stack:
        for _ in range(3):
            assert (await stack.chat()).status_code == 200
        assert not odd.submissions


async def test_engines_behind_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    # A port of its own on several loopback addresses is what a headless service looks like.
    records: list[str] = ["127.0.0.2"]
    failed = asyncio.Event()
    first = ScriptedEngine(name="first")
    server = await serve_engine(first, "127.0.0.2:0")
    second = ScriptedEngine(name="second")
    second_server = await serve_engine(second, f"127.0.0.3:{server.port}")

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        assert host == "engines.internal"
        if not records:
            failed.set()
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in records]

    monkeypatch.setattr(fleet, "resolve", resolve)
    tables = {"gateway": {"discovery": f"dns:engines.internal:{server.port}", "discovery_interval_s": 0.02}}
    async with deployed(tables=tables) as stack, asyncio.timeout(30):
        assert (await stack.chat()).status_code == 200
        # A name that cannot be resolved changes nothing.
        records.clear()
        await failed.wait()
        assert (await stack.chat()).status_code == 200
        assert len(first.submissions) == 2
        records.append("127.0.0.3")
        while not second.submissions:
            assert (await stack.chat()).status_code in (200, 503)
        served = len(first.submissions)
        for _ in range(3):
            assert (await stack.chat()).status_code == 200
        assert len(first.submissions) == served
    await server.stop(0)
    await second_server.stop(0)


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
