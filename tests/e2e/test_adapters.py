"""Adapters that come, change and go while an engine serves, whichever make's core it has."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest

from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, START_LIMIT_S, Stack, eventually, raw, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

PIRATE, ENTRIES = (BUNDLED_MODEL / "adapters" / name for name in ("pirate", "entries"))


def change(stack: Stack, action: str, **fields: object) -> tuple[int, str]:
    """Status and text of what the operator is answered."""
    answer = raw(stack, f"/v1/{action}_lora_adapter", json.dumps(fields).encode())
    return answer.status_code, answer.text


def said(client: openai.OpenAI, model: str) -> str:
    """The likeliest answer."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        max_tokens=24,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """An adapter whose file of weights ends early."""
    folder = tmp_path / "broken"
    shutil.copytree(PIRATE, folder)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    return folder


def test_an_adapter_that_cannot_be_read_is_refused_and_ends_nothing(
    client: openai.OpenAI, stack: Stack, broken: Path
) -> None:
    engine = stack.pid("engine-0")
    for folder in (broken, broken / "missing"):
        status, text = change(stack, "load", lora_name="broken", lora_path=str(folder))
        assert status == 400, text
        assert str(folder) in text
    with pytest.raises(openai.NotFoundError):
        said(client, f"{stack.model}:broken")
    assert said(client, f"{stack.model}:pirate")
    assert stack.pid("engine-0") == engine


def test_a_name_stands_for_the_adapter_that_was_added_last(client: openai.OpenAI, stack: Stack) -> None:
    pirate, entries = (said(client, f"{stack.model}:{name}") for name in ("pirate", "entries"))
    assert pirate != entries
    for folder, expected in ((PIRATE, pirate), (ENTRIES, entries)):
        status, text = change(stack, "load", lora_name="other", lora_path=str(folder))
        assert status == 200, text
        # Twice: the second one finds what the first has left in the cache.
        assert [said(client, f"{stack.model}:other") for _ in range(2)] == [expected, expected]
    status, text = change(stack, "unload", lora_name="other")
    assert status == 200, text
    with pytest.raises(openai.NotFoundError):
        said(client, f"{stack.model}:other")
    assert said(client, f"{stack.model}:pirate") == pirate


def test_a_killed_engine_answers_with_what_was_loaded_last(tmp_path: Path) -> None:
    configured = f"""
{CONFIG}
[models.x]
path = "{BUNDLED_MODEL}"
[models.x.adapters.conf]
path = "{PIRATE}"
[models.x.adapters.gone]
path = "{PIRATE}"
"""
    with running_stack(tmp_path, "--engines", "2", config=configured, model=None) as stack:

        def answers(number: int) -> list[str]:
            """As many at a time as need both engines."""

            def answer(_: int) -> str:
                with stack.openai() as client:
                    return said(client, "x:conf")

            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(answer, range(number)))

        def came_back(engine: str) -> bool:
            return f"{engine} is ready again" in stack.output.read_text()

        with stack.openai() as client:
            pirate, entries = (said(client, f"x:{name}") for name in ("pirate", "entries"))
        assert set(answers(8)) == {pirate}
        for action, fields in (
            ("unload", {"lora_name": "x:gone"}),
            ("unload", {"lora_name": "x:conf"}),
            ("load", {"lora_name": "x:conf", "lora_path": str(ENTRIES)}),
        ):
            status, text = change(stack, action, **fields)
            assert status == 200, text
        for killed in ("engine-0", "engine-1"):
            os.kill(stack.pid(killed), signal.SIGKILL)
            # While it is away, when it has just come back, and when it has been given what it lacks.
            told = answers(8)
            assert eventually(partial(came_back, killed), START_LIMIT_S)
            told += answers(48)
            assert set(told) == {entries}
            # The other one may be all that has answered, and is killed next.
            assert eventually(lambda: stack.num_attached() == 2), stack.transcript()
        with stack.openai() as client, pytest.raises(openai.NotFoundError):
            said(client, "x:gone")
