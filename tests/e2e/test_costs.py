"""Whose the engine's time was: the ledger's seconds are those of all steps, its tokens the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from gateway.ledger.usage import usage
from observability.emit.names import ENGINE_SECONDS, GENERATED_TOKENS, STEP_SECONDS
from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, has_bundled_weights, running_stack

POISON = 999
PRICED = '[gateway.prices."*"]\nprompt = 1.0\ncompletion = 2.0\nengine_hour = 3600.0\n'
SIMULATED = {
    "MILLRACE_ENGINE__SIMULATION__STEP_MS": "20",
    "MILLRACE_ENGINE__SIMULATION__POISON_TOKEN_ID": str(POISON),
    "MILLRACE_ENGINE__SIMULATION__NUM_BLOCKS": "24",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "6",
}
REAL = {
    "MILLRACE_ENGINE__SPECULATION__METHOD": "ngram",
    "MILLRACE_ENGINE__SPECULATION__MIN_ACCEPTANCE": "0",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "6",
}


@pytest.fixture(scope="module", params=["simulated", "real"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    is_real = request.param == "real"
    if is_real and not has_bundled_weights():
        pytest.skip("the bundled model has no weights here")
    arguments = () if is_real else ("--simulated",)
    folder = tmp_path_factory.mktemp(request.param)
    environment = REAL if is_real else SIMULATED
    with running_stack(folder, *arguments, config=CONFIG + PRICED, environment=environment) as running:
        yield running


def rows(folder: Path) -> list[Any]:
    with open_ledger(f"sqlite:///{folder}/ledger.sqlite").connect() as connection:
        return list(connection.execute(select(REQUESTS)).mappings())


def spent_s(row: Any) -> float:
    return float(
        sum(value for name, value in row.items() if name.startswith("engine_") and name[-2:] == "_s")
    )


def busy_s(stack: Stack) -> float:
    """For how long steps were computed, by the engine's own metric."""
    return sum(
        value
        for reading in stack.metrics("engine")
        for (name, _), value in reading.samples.items()
        if name == f"{STEP_SECONDS.name}_sum"
    )


async def load(client: openai.AsyncOpenAI, stack: Stack, is_real: bool) -> None:
    """Answers of every kind, and requests that end in every way."""

    async def ask(prompt: Any = "Once upon a time, once upon a time", **more: Any) -> None:
        named = ("beam_width", "service_tier")
        own = {"ignore_eos": True, **{key: more.pop(key) for key in named if key in more}}
        if "beam_width" in own:
            del own["ignore_eos"]
        await client.completions.create(
            model=stack.model, prompt=prompt, extra_body=own, **{"max_tokens": 30, "temperature": 0.0, **more}
        )

    async def leave(num_chunks: int) -> None:
        chunks = await client.completions.create(
            model=stack.model, prompt="Never", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in chunks:
            num_chunks -= 1
            if not num_chunks:
                break
        await chunks.close()

    asking = [
        # Four of them need more blocks than there are.
        *(ask(max_tokens=100) for _ in range(8)),
        *(ask(service_tier="interactive", max_tokens=50) for _ in range(4)),
        ask(n=3, temperature=1.0),
        ask(n=2, best_of=4, temperature=1.0),
        ask(beam_width=3),
        ask(stop=["a", "e"]) if is_real else ask(prompt=[POISON] * 4),
        *(leave(number) for number in (1, 3, 7)),
    ]
    if is_real:
        asking += [client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Yes or no?"}],
            extra_body={"guided_choice": ["yes", "no"]},
            extra_headers={"x-client-request-id": "mine-7", "x-stainless-retry-count": "2"},
        )]  # fmt: skip
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    # The poisoned one alone fails.
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    assert len(failures) == (not is_real), failures


def test_the_ledgers_seconds_and_tokens_are_the_engines(stack: Stack) -> None:
    is_real = "simulated" not in str(stack.directory)

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key=stack.state.api_key, max_retries=0, timeout=LIMIT_S
        ) as client:
            # Twice: the second time prompts are cached.
            await load(client, stack, is_real)
            await load(client, stack, is_real)

    asyncio.run(run())
    expected = 2 * (19 + is_real)
    assert eventually(lambda: len(rows(stack.directory)) == expected), len(rows(stack.directory))
    found = rows(stack.directory)
    told = sum(map(spent_s, found))
    assert told == pytest.approx(busy_s(stack), rel=0.01), {row["outcome"]: spent_s(row) for row in found}
    by_use = sum(reading.value(ENGINE_SECONDS) for reading in stack.metrics("engine"))
    assert told == pytest.approx(by_use, rel=1e-6)
    kinds = ("completion_tokens", "candidate_tokens", "unclaimed_tokens")
    tokens = sum(row[kind] for row in found for kind in kinds)
    generated = sum(reading.value(GENERATED_TOKENS) for reading in stack.metrics("engine"))
    assert tokens == generated
    # Some of each: who left, whom a step failed, who lost its place, what was drafted in vain.
    assert sum(row["engine_decode_s"] for row in found if row["outcome"] == "CANCELLED") > 0
    if is_real:
        assert sum(row["engine_speculative_waste_s"] for row in found) > 0
        assert {(row["guided"], row["client_request_id"], row["num_retries"]) for row in found} >= {
            ("choice", "mine-7", 2)
        }
    else:
        poisoned = [row for row in found if row["outcome"] == "POISONED_REQUEST"]
        assert len(poisoned) == 2
        assert all(row["engine_recompute_s"] > 0 for row in poisoned)
        assert sum(row["num_preemptions"] for row in found) > 0
    by_path = usage(open_ledger(f"sqlite:///{stack.directory}/ledger.sqlite"), ["path", "bucket"])
    # An hour costs 3600, a second 1.
    assert sum(row.numbers["engine_cost"] for row in by_path) == pytest.approx(told, rel=1e-6)
    assert any("candidates" in row.group[0] for row in by_path)
