"""A canary's share of ten thousand requests on the wire, and who had it keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from services.bench.client import BenchTarget, Client
from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest
from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

STABLE, CANARY = "chat@1", "chat@2"
NUM_KEYS = 10_000
NUM_AT_A_TIME = 64
TEN_PER_CENT = f"""
[gateway.ledger]
url = ""
[observability]
sample_ratio = 0.0
[models."{STABLE}"]
path = "{BUNDLED_MODEL}"
[models."{CANARY}"]
path = "{BUNDLED_MODEL}"
[routes]
chat = {{"{STABLE}" = 90, "{CANARY}" = 10}}
"""


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("canary")
    # Two gateways: each picks alone, and they have to agree.
    with running_stack(folder, "--simulated", "--gateways", "2", config=TEN_PER_CENT, model=None) as stack:
        yield stack


def planned(key: int) -> PlannedRequest:
    body = {
        "model": "chat",
        "prompt": "hi",
        "max_tokens": 1,
        "stream": True,
        "prompt_cache_key": f"talk {key}",
    }
    return PlannedRequest(
        index=key,
        start_s=0.0,
        tier="",
        path="/v1/completions",
        body=msgspec.json.encode(body),
        prompt_tokens=1,
    )


async def told(stack: Stack, keys: range) -> list[str]:
    """Who answered a request with each key."""
    client = Client(BenchTarget.parse(stack.url, stack.state.api_key))
    records: dict[int, RequestRecord] = {}
    waiting = iter(keys)

    async def work() -> None:
        for key in waiting:
            records[key] = await client.run(planned(key))

    await asyncio.gather(*(work() for _ in range(NUM_AT_A_TIME)))
    await client.close()
    assert all(record.ok for record in records.values()), next(
        record.error for record in records.values() if not record.ok
    )
    return [records[key].model for key in keys]


def test_a_canary_gets_its_share_of_ten_thousand_within_one_per_cent_and_keeps_its_keys(
    routed: Stack,
) -> None:
    first = asyncio.run(told(routed, range(NUM_KEYS)))
    assert set(first) == {STABLE, CANARY}
    assert abs(first.count(CANARY) / NUM_KEYS - 0.10) < 0.01
    # Asked again, on whatever connection and gateway.
    some = range(0, NUM_KEYS, 10)
    assert asyncio.run(told(routed, some)) == [first[key] for key in some]
