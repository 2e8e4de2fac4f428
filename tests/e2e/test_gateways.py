"""Several gateways behind one Envoy: limits hold over all of them; a lost one takes nobody along."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.stack import LIMIT_S, Stack, eventually, limited_config, running_stack
from tests.redis_server import RedisServer

KEYS = {name: f"mr-{name}-of-all" for name in ("minute", "slots", "month")}
LEASE_S = 2.0
HELLO = [{"role": "user", "content": "Hi"}]


def config(store: str) -> str:
    tenants = [
        "[tenants.minute]\nrequests_per_minute = 5",
        "[tenants.slots]\nmax_concurrent_streams = 3",
        "[tenants.month]\nmonthly_tokens = 200",
    ]
    return limited_config(store, LEASE_S, tenants, KEYS)


@pytest.fixture(scope="module")
def pair(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways, one Redis; tokens come slowly enough to be interrupted."""
    environment = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}
    with running_stack(
        tmp_path_factory.mktemp("pair"),
        *("--simulated", "--gateways", "2"),
        config=config(redis.url),
        environment=environment,
    ) as stack:
        assert "warning" not in stack.output.read_text()
        yield stack


def client_of(stack: Stack, tenant: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1",
        api_key=KEYS.get(tenant) or stack.state.api_key,
        max_retries=0,
        timeout=LIMIT_S,
    )


def served_by(stack: Stack) -> list[float]:
    """Requests that each gateway has accepted."""
    counts = []
    for address in stack.addresses("gateway", "metrics"):
        exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
        lines = [line for line in exposed if line.startswith("millrace_requests_total{")]
        counts.append(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
    return counts


async def outcome(client: openai.AsyncOpenAI, stack: Stack, max_tokens: int = 1, **options: Any) -> str:
    try:
        await client.chat.completions.create(
            model=stack.model, messages=HELLO, max_tokens=max_tokens, **options
        )
    except openai.APIStatusError as error:
        return str(error.response.json()["error"]["reason"])
    return "ok"


def test_requests_per_minute_are_counted_over_all_gateways(pair: Stack) -> None:
    async def ask() -> Counter[str]:
        async with client_of(pair, "minute") as client:
            return Counter(await asyncio.gather(*(outcome(client, pair) for _ in range(30))))

    assert asyncio.run(ask()) == {"ok": 5, "REQUEST_RATE_EXCEEDED": 25}


def test_streams_are_counted_over_all_gateways_and_both_serve(pair: Stack) -> None:
    before = served_by(pair)

    async def ask() -> Counter[str]:
        async with client_of(pair, "slots") as client:
            return Counter(await asyncio.gather(*(outcome(client, pair, 40) for _ in range(12))))

    for _ in range(2):
        assert asyncio.run(ask()) == {"ok": 3, "CONCURRENCY_EXCEEDED": 9}
    assert all(now > then for now, then in zip(served_by(pair), before, strict=True))
    pair.assert_nothing_leaked()


def test_branches_are_streams_over_all_gateways(pair: Stack) -> None:
    async def ask() -> Counter[str]:
        async with client_of(pair, "slots") as client:
            asking = [outcome(client, pair, 60, n=2, extra_body={"ignore_eos": True}) for _ in range(6)]
            return Counter(await asyncio.gather(*asking))

    async def ask_too_much() -> tuple[openai.BadRequestError, openai.BadRequestError]:
        async with client_of(pair, "slots") as client:
            with pytest.raises(openai.BadRequestError) as choices:
                await client.chat.completions.create(
                    model=pair.model, messages=HELLO, n=4, temperature=1.0, max_tokens=1
                )
            with pytest.raises(openai.BadRequestError) as prompts:
                await client.completions.create(model=pair.model, prompt=["a", "b", "c", "d"], max_tokens=1)
        return choices.value, prompts.value

    # Three slots: one request of two streams, and every slot is free again after it.
    for _ in range(2):
        assert asyncio.run(ask()) == {"ok": 1, "CONCURRENCY_EXCEEDED": 5}
    choices, prompts = asyncio.run(ask_too_much())
    assert (choices.param, prompts.param) == ("n", "prompt")
    assert "the limit is 3 (max_concurrent_streams of tenant slots)" in choices.message
    assert "retry-after" not in choices.response.headers
    pair.assert_nothing_leaked()


def test_monthly_tokens_end_an_answer_wherever_it_is_written(pair: Stack) -> None:
    async def ask() -> list[int]:
        async with client_of(pair, "month") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=pair.model, messages=HELLO, max_tokens=120, extra_body={"ignore_eos": True}
                    )
                    for _ in range(6)
                ),
                return_exceptions=True,
            )
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert {error.response.json()["error"]["reason"] for error in refused} == {"BUDGET_EXHAUSTED"}
        return [answer.usage.total_tokens for answer in answers if not isinstance(answer, BaseException)]

    used = asyncio.run(ask())
    assert 0 < sum(used) <= 200


def test_one_gateway_killed_ends_its_streams_alone_and_its_slots_come_back(pair: Stack) -> None:
    async def stream(client: openai.AsyncOpenAI, begun: asyncio.Event) -> str:
        try:
            chunks = await client.chat.completions.create(
                model=pair.model,
                messages=HELLO,
                max_tokens=150,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in chunks:
                begun.set()
                if chunk.choices and chunk.choices[0].finish_reason:
                    return str(chunk.choices[0].finish_reason)
        except (openai.APIError, httpx.HTTPError):
            return "cut off"
        return "cut off"

    async def ask() -> tuple[Counter[str], Counter[str]]:
        async with client_of(pair) as free, client_of(pair, "slots") as limited:
            begun = [asyncio.Event() for _ in range(8)]
            streams = [
                asyncio.create_task(stream(free if index else limited, event))
                for index, event in enumerate(begun)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            os.kill(pair.pid("gateway-1"), signal.SIGKILL)
            during: Counter[str] = Counter()
            while not during["ok"] and during.total() < 100:
                during[await outcome(free, pair)] += 1
            return Counter(await asyncio.gather(*streams)), during

    ended, during = asyncio.run(ask())
    assert set(ended) <= {"length", "cut off"}
    # Envoy spreads requests evenly, so that each of the two had some of them.
    assert 0 < ended["length"] < 8
    # The other one serves on. Envoy takes a request that a dead gateway could not be given to another one;
    # only what was under way to it is refused.
    assert during["ok"] >= 1
    assert eventually(lambda: "gateway-1 is ready again" in pair.output.read_text()), pair.transcript()

    async def all_slots() -> Counter[str]:
        async with client_of(pair, "slots") as client:
            return Counter(await asyncio.gather(*(outcome(client, pair, 20) for _ in range(4))))

    assert eventually(lambda: asyncio.run(all_slots())["ok"] == 3)
    pair.assert_nothing_leaked()


def test_all_that_wait_for_a_killed_gateway_are_answered_by_another(pair: Stack) -> None:
    def active(address: str) -> float:
        exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in exposed if line.startswith("millrace_active_requests{")
        )

    async def one() -> str:
        async with client_of(pair) as client:
            return await outcome(client, pair)

    def both_serve() -> bool:
        assert asyncio.run(one()) == "ok"
        return all(served_by(pair))

    async def ask() -> Counter[str]:
        async with client_of(pair) as client:
            waiting = [asyncio.create_task(outcome(client, pair, 100)) for _ in range(24)]
            addresses = pair.addresses("gateway", "metrics")
            await asyncio.to_thread(lambda: eventually(lambda: sum(map(active, addresses)) == len(waiting)))
            # More of them than Envoy repeats at once by default.
            assert active(addresses[0]) > 3
            os.kill(pair.pid("gateway-0"), signal.SIGKILL)
            return Counter(await asyncio.gather(*waiting))

    # Envoy has to have found both healthy.
    assert eventually(both_serve)
    assert asyncio.run(ask()) == {"ok": 24}
    assert eventually(lambda: "gateway-0 is ready again" in pair.output.read_text()), pair.transcript()
    pair.assert_nothing_leaked()


def test_redis_lost_refuses_what_must_be_counted_and_says_so(pair: Stack, redis: RedisServer) -> None:
    def health() -> list[object]:
        return [
            httpx.get(f"http://{address}/health", trust_env=False).json().get("limit_store")
            for address in pair.addresses("gateway", "http")
        ]

    async def ask(tenant: str) -> str:
        async with client_of(pair, tenant) as client:
            return await outcome(client, pair)

    assert health() == ["up", "up"]
    redis.kill()
    assert eventually(lambda: health() == ["lost, policy closed applies"] * 2)
    assert asyncio.run(ask("slots")) == "LIMITS_UNAVAILABLE"
    # Nothing of this tenant is counted, so nothing is missing.
    assert asyncio.run(ask("")) == "ok"
    redis.start()
    assert eventually(lambda: health() == ["up", "up"])
    assert asyncio.run(ask("slots")) == "ok"
