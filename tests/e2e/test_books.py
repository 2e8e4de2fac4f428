"""The books of the real stack: engine, ledger, meter and client count the same tokens, whatever happens."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis as sync_redis
from sqlalchemy import select

from gateway.ledger.journal import _read
from gateway.ledger.tables import REQUESTS, open_ledger
from observability.emit.names import GENERATED_TOKENS, STEP_SECONDS
from tests.e2e.stack import LIMIT_S, Stack, eventually, limited_config, running_stack
from tests.redis_server import RedisServer

KEYS = {name: f"mr-{name}-of-books" for name in ("metered", "month")}
MONTH_TOKENS = 600
SLOW_STEPS = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}


def config(store: str = "") -> str:
    metered = "[tenants.metered]\nmonthly_tokens = 1000000\nmax_concurrent_streams = 100"
    return limited_config(store, 5, [metered, f"[tenants.month]\nmonthly_tokens = {MONTH_TOKENS}"], KEYS)


@pytest.fixture(scope="module")
def metered(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("metered")
    with running_stack(folder, "--simulated", config=config(redis.url), environment=SLOW_STEPS) as stack:
        yield stack


def client_of(stack: Stack, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=LIMIT_S
    )


def rows(folder: Path, tenant: str) -> list[Any]:
    with open_ledger(f"sqlite:///{folder}/ledger.sqlite").connect() as connection:
        return list(connection.execute(select(REQUESTS).where(REQUESTS.c.tenant == tenant)).mappings())


def in_ledger(folder: Path, tenant: str) -> tuple[int, int]:
    """(prompt, generated) tokens."""
    found = rows(folder, tenant)
    return (
        sum(row["prompt_tokens"] for row in found),
        sum(row["completion_tokens"] + row["candidate_tokens"] for row in found),
    )


def unclaimed(folder: Path, tenant: str) -> int:
    """What was computed for a gateway that was gone, and nobody pays for."""
    return sum(row["unclaimed_tokens"] for row in rows(folder, tenant))


def generated(stack: Stack) -> int:
    """Tokens that the engine has computed, by its own count."""
    return round(sum(reading.value(GENERATED_TOKENS) for reading in stack.metrics("engine")))


def not_in_ledger(stack: Stack) -> int:
    """Tokens that the engine has computed and no row of the tenant has, of whatever kind."""
    folder = stack.directory
    return generated(stack) - in_ledger(folder, "metered")[1] - unclaimed(folder, "metered")


def num_steps(stack: Stack) -> float:
    """Steps that the engine has computed."""
    return sum(reading.buckets(STEP_SECONDS).get(math.inf, 0.0) for reading in stack.metrics("engine"))


def meter(server: RedisServer) -> tuple[int, int]:
    """What Redis holds for the month, and slots that are held."""
    with sync_redis.Redis.from_url(server.url) as client:
        keys = client.keys("millrace:tenant:metered:tokens:*")
        held = client.zcard("millrace:tenant:metered:streams")
        return sum(int(client.get(key)) for key in keys), held  # type: ignore[arg-type,union-attr,return-value]


async def ask(client: openai.AsyncOpenAI, stack: Stack, **more: Any) -> Any:
    options = {"max_tokens": 20, "temperature": 1.0, **more}
    own = {"ignore_eos": True, **{name: options.pop(name) for name in ("beam_width",) if name in options}}
    if "beam_width" in own:
        del own["ignore_eos"], options["temperature"]
    return await client.completions.create(model=stack.model, prompt="Once", extra_body=own, **options)


def all_agree(stack: Stack, server: RedisServer, before: int) -> None:
    """Engine, ledger and meter have counted the same since the engine's count was `before`."""

    def agree() -> bool:
        prompt, completion = in_ledger(stack.directory, "metered")
        return generated(stack) - before == completion and meter(server) == (prompt + completion, 0)

    assert eventually(agree), (
        in_ledger(stack.directory, "metered"),
        generated(stack) - before,
        meter(server),
    )


def test_candidates_and_beams_are_what_the_engine_computed(metered: Stack, redis: RedisServer) -> None:
    before = generated(metered) - in_ledger(metered.directory, "metered")[1]

    async def answered() -> list[int]:
        async with client_of(metered, "metered") as client:
            answers = await asyncio.gather(
                ask(client, metered, best_of=8),
                ask(client, metered, n=2, best_of=5),
                ask(client, metered, beam_width=4),
                ask(client, metered, n=3),
            )
            return [answer.usage.completion_tokens for answer in answers]

    used = asyncio.run(answered())
    assert used[0] == 8 * 20
    assert used[1] == 5 * 20
    assert used[3] == 3 * 20
    all_agree(metered, redis, before)
    assert in_ledger(metered.directory, "metered")[1] == sum(used)


def test_whoever_leaves_has_paid_for_candidates(metered: Stack, redis: RedisServer) -> None:
    before = generated(metered) - in_ledger(metered.directory, "metered")[1]
    num_rows = len(rows(metered.directory, "metered"))
    steps_before = num_steps(metered)

    async def leave() -> None:
        async with client_of(metered, "metered") as client:
            asking = asyncio.create_task(ask(client, metered, best_of=6, max_tokens=500))
            under_way = await asyncio.to_thread(eventually, lambda: num_steps(metered) > steps_before + 3)
            assert under_way
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    assert eventually(lambda: len(rows(metered.directory, "metered")) == num_rows + 1)
    last = max(rows(metered.directory, "metered"), key=lambda row: row["ended_unix_ms"])
    assert last["candidate_tokens"] > 0 == last["completion_tokens"]
    all_agree(metered, redis, before)


@pytest.mark.parametrize("hang_s", [2.0, 20.0])
def test_a_store_that_hangs_while_streams_settle(metered: Stack, redis: RedisServer, hang_s: float) -> None:
    before = generated(metered) - in_ledger(metered.directory, "metered")[1]

    async def hang() -> None:
        async with client_of(metered, "metered") as client:
            asking = [
                asyncio.create_task(ask(client, metered, max_tokens=30 + number)) for number in range(20)
            ]
            held = await asyncio.to_thread(eventually, lambda: meter(redis)[1] == 20)
            assert held
            redis.hang()
            # Some more ask while it hangs; they are refused, and charged nothing.
            asking += [asyncio.create_task(ask(client, metered)) for _ in range(5)]
            await asyncio.sleep(hang_s)
            redis.wake()
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            assert not any(isinstance(each, BaseException) for each in outcomes[:20])

    try:
        asyncio.run(hang())
    finally:
        redis.wake()
    all_agree(metered, redis, before)


async def stream(client: openai.AsyncOpenAI, stack: Stack, begun: asyncio.Event) -> int:
    """Tokens that a client got before its stream was cut off."""
    num_tokens = 0
    try:
        chunks = await client.completions.create(
            model=stack.model,
            prompt="Once",
            max_tokens=60,
            stream=True,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                num_tokens += len(choice.logprobs.tokens or ()) if choice.logprobs else 0
            if num_tokens >= 5:
                begun.set()
    except (openai.APIError, httpx.HTTPError):
        pass
    return num_tokens


async def kill_in_the_middle(stack: Stack, tenant: str) -> list[int]:
    """Kills the gateway under three streams; what each client got."""
    async with client_of(stack, tenant) as client:
        begun = [asyncio.Event() for _ in range(3)]
        streams = [asyncio.create_task(stream(client, stack, each)) for each in begun]
        await asyncio.gather(*(each.wait() for each in begun))
        os.kill(stack.pid("gateway-0"), signal.SIGKILL)
        return list(await asyncio.gather(*streams))


def ready_again(stack: Stack, times: int) -> bool:
    """Also for Envoy, which hears of it a little later."""
    is_back = stack.output.read_text().count("gateway-0 is ready again") >= times
    return is_back and httpx.get(f"{stack.url}/health", trust_env=False).status_code == 200


def assert_interrupted(found: list[Any], told: list[int]) -> None:
    """What clients got is there; what was on its way to them is at most a few steps more."""
    assert [row["outcome"] for row in found] == ["interrupted"] * 3
    for kept, got in zip(sorted(row["completion_tokens"] for row in found), sorted(told), strict=True):
        assert got <= kept <= got + 15


def test_a_killed_gateways_holds_are_settled_by_the_next(metered: Stack, redis: RedisServer) -> None:
    known = {row["entry_id"] for row in rows(metered.directory, "metered")}
    before = not_in_ledger(metered)
    told = asyncio.run(kill_in_the_middle(metered, "metered"))
    assert eventually(lambda: ready_again(metered, 1)), metered.transcript()
    assert_interrupted(
        [row for row in rows(metered.directory, "metered") if row["entry_id"] not in known], told
    )
    assert meter(redis) == (sum(in_ledger(metered.directory, "metered")), 0)
    assert eventually(lambda: not_in_ledger(metered) == before)
    assert unclaimed(metered.directory, "metered") > 0


def test_candidates_and_beams_of_a_killed_gateway_are_in_the_ledger(
    metered: Stack, redis: RedisServer
) -> None:
    before = not_in_ledger(metered)
    known = {row["entry_id"] for row in rows(metered.directory, "metered")}
    times = metered.output.read_text().count("gateway-0 is ready again") + 1

    def candidates_told() -> list[int]:
        (path,) = (metered.directory / "ledger.sqlite-open").glob("*.open")
        return [each.request.candidate_tokens for each in _read(path.read_bytes(), 0)[0]]

    async def kill() -> None:
        async with client_of(metered, "metered") as client:
            asking = [
                asyncio.create_task(ask(client, metered, max_tokens=800, **how))
                for how in ({"best_of": 6}, {"beam_width": 4})
            ]
            begun = lambda: sum(each >= 60 for each in candidates_told()) == len(asking)  # noqa: E731
            assert await asyncio.to_thread(eventually, begun)
            os.kill(metered.pid("gateway-0"), signal.SIGKILL)
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(kill())
    assert eventually(lambda: ready_again(metered, times)), metered.transcript()
    left = [row for row in rows(metered.directory, "metered") if row["entry_id"] not in known]
    assert [(row["outcome"], row["completion_tokens"]) for row in left] == [("interrupted", 0)] * 2
    assert sum(row["candidate_tokens"] for row in left) >= 120
    # Some steps were on their way.
    assert eventually(lambda: not_in_ledger(metered) == before)
    assert meter(redis) == (sum(in_ledger(metered.directory, "metered")), 0)


def test_the_only_gateway_killed_keeps_its_books_and_the_limits_of_the_month(tmp_path: Path) -> None:
    async def use_up(stack: Stack) -> None:
        async with client_of(stack, "month") as client:
            asking = (ask(client, stack, max_tokens=60) for _ in range(MONTH_TOKENS))
            with pytest.raises(openai.RateLimitError) as refused:
                [await each for each in asking]
            assert refused.value.response.json()["error"]["reason"] == "BUDGET_EXHAUSTED"

    with running_stack(tmp_path, "--simulated", config=config(), environment=SLOW_STEPS) as stack:
        told = asyncio.run(kill_in_the_middle(stack, "month"))
        assert eventually(lambda: ready_again(stack, 1)), stack.transcript()
        assert_interrupted(rows(tmp_path, "month"), told)
        for times in (2, 3):
            asyncio.run(use_up(stack))
            os.kill(stack.pid("gateway-0"), signal.SIGKILL)
            assert eventually(lambda times=times: ready_again(stack, times)), stack.transcript()  # type: ignore[misc]
            assert MONTH_TOKENS - 10 <= sum(in_ledger(tmp_path, "month")) <= MONTH_TOKENS
