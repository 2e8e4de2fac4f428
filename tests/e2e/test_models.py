"""Several real models behind one door: every answer is that of the model alone, whatever comes and goes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from observability.emit import names
from services.supervisor.config import ROOT
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, START_LIMIT_S, Stack, eventually, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

BIG, SMALL = ROOT / "models" / "millrace-nano", ROOT / "models" / "millrace-nano-draft"
NUM_STREAMS = 64
TWO = f"""
{CONFIG}
[models.big]
path = "{BIG}"
[models.big.adapters.sailor]
path = "{BIG}/adapters/pirate"
[models."small@1"]
path = "{SMALL}"
[routes]
chat = {{big = 90, "small@1" = 10}}
[shadows.chat]
model = "small@1"
"""
THIRD = f"""
[models.third]
path = "{SMALL}"
engines = 1
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("models"), "--engines", "2", config=TWO, model=None) as stack:
        yield stack


def ask(stack: Stack, model: str, number: int) -> tuple[str, str, bool]:
    """Who answered a stream, what, and whether it ended well."""
    with stack.openai() as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Tell me about the number {number}."}],
            max_tokens=48,
            temperature=0,
            stream=True,
            prompt_cache_key=str(number),
        )
        texts, told, reason = [], "", None
        for chunk in stream:
            told = chunk.model
            texts.append(chunk.choices[0].delta.content or "")
            reason = chunk.choices[0].finish_reason or reason
        return told, "".join(texts), reason in ("stop", "length")


def streams(stack: Stack, asked: list[str]) -> list[tuple[str, str, bool]]:
    """All at once."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running: list[Future[Any]] = [
            pool.submit(ask, stack, asked[each % len(asked)], each) for each in range(NUM_STREAMS)
        ]
        return [each.result() for each in running]


def alone(stack: Stack, told: list[tuple[str, str, bool]]) -> None:
    """Every answer is that of its model to the same prompt, one after the other."""
    for number, (model, text, ended) in enumerate(told):
        assert ended
        assert ask(stack, model, number)[:2] == (model, text)


def test_every_greedy_answer_equals_the_same_prompt_sent_alone(models: Stack) -> None:
    adapters = ["big:pirate", "big:entries", "big:sailor"]
    asked = ["big", "small@1", "chat", *adapters]
    told = streams(models, asked)
    for number, (model, _, _) in enumerate(told):
        name = asked[number % len(asked)]
        assert model in ({"big", "small@1"} if name == "chat" else {name})
    alone(models, told)
    assert eventually(lambda: copies(models) > 0)


def copies(stack: Stack) -> float:
    """Requests that were copied for the shadow and compared, or dropped."""
    return sum(reading.value(names.SHADOW_REQUESTS) for reading in stack.metrics("gateway"))


def listed(stack: Stack) -> list[str]:
    with stack.openai() as client:
        return [each.id for each in client.models.list()]


def test_a_model_comes_and_another_goes_under_64_streams(models: Stack) -> None:
    file = models.directory / "millrace.toml"
    began_ms = time.time_ns() // 1_000_000
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streams, models, ["big"])
        file.write_text(TWO + THIRD)
        # Its engine loads beside the streams.
        assert eventually(lambda: "third" in listed(models), START_LIMIT_S)
        told = running.result()
        running = pool.submit(streams, models, ["big"])
        file.write_text(TWO)
        assert eventually(lambda: "third" not in listed(models))
        told_later = running.result()
    # Its engine ends when nothing is sent to it any more.
    assert eventually(lambda: len(models.addresses("engine", "grpc")) == 4)
    assert told == told_later
    alone(models, told[:8])
    expected = 2 * NUM_STREAMS + 8
    assert eventually(lambda: num_rows(models.directory, began_ms) >= expected)
    assert num_rows(models.directory, began_ms) == expected


def num_rows(directory: Path, since_unix_ms: int) -> int:
    """Of requests that ended since: those of earlier ones may still be on their way."""
    asked = "SELECT count(*) FROM requests WHERE ended_unix_ms >= ?"
    with sqlite3.connect(directory / "ledger.sqlite") as connection:
        return int(connection.execute(asked, (since_unix_ms,)).fetchone()[0])
