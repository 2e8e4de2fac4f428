"""Three models where two are in memory at a time: every request is answered, by the model that it names."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from services.supervisor.config import ROOT
from tests.e2e.stack import CONFIG, LIMIT_S, START_LIMIT_S, Stack, eventually, running_stack, start_stack

pytestmark = pytest.mark.e2e

MODEL = ROOT / "models" / "millrace-nano"
NAMES = ("red", "green", "blue")
MODELS = "".join(
    f'[models.{name}]\npath = "{MODEL}"\nload = "on demand"\nidle_unload_s = {idle_s}\n'
    for name, idle_s in zip(NAMES, (0, 0, 1), strict=True)
)
TWO_OF_THREE = f"{CONFIG}\n[supervisor]\non_demand_models = 2\n{MODELS}"
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("models")
    with running_stack(directory, "--simulated", config=TWO_OF_THREE, model=None) as stack:
        yield stack


def ask(stack: Stack, model: str, max_tokens: int = 8) -> tuple[str, int]:
    """The model that answered, and the tokens of the answer."""
    with stack.openai() as client:
        answer = client.with_options(timeout=START_LIMIT_S).completions.create(
            model=model, prompt=[300, 301], max_tokens=max_tokens
        )
    assert answer.usage is not None
    return answer.model, answer.usage.completion_tokens


def states(stack: Stack) -> dict[str, str]:
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    with httpx.Client(trust_env=False, headers=headers, timeout=LIMIT_S) as client:
        cards = client.get(f"{stack.url}/v1/models").json()["data"]
    # Once an engine has been there, its adapters are listed, too.
    return {each["id"]: each["state"] for each in cards if each["id"] in NAMES}


def engines(stack: Stack) -> list[psutil.Process]:
    """Processes of engines, their cores left out."""
    found = []
    for child in psutil.Process(stack.process.pid).children():
        with suppress(psutil.Error):
            if "engine" in child.cmdline():
                found.append(child)
    return found


def test_nothing_is_loaded_before_it_is_asked_for(models: Stack) -> None:
    assert states(models) == dict.fromkeys(NAMES, "unloaded")
    assert engines(models) == []
    assert ask(models, "red") == ("red", 8)
    assert states(models)["red"] == "loaded"
    assert len(engines(models)) == 1


def test_requests_in_random_order_are_all_answered(models: Stack) -> None:
    chosen = random.Random(3)
    asked = [chosen.choice(NAMES) for _ in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(ask, models, name, chosen.randrange(4, 40)) for name in asked]
        most = 0
        while not all(each.done() for each in running):
            loaded = [state for state in states(models).values() if state != "unloaded"]
            most = max(most, len(loaded))
            assert len(loaded) <= 2
        answers = [each.result() for each in running]
    assert [model for model, _ in answers] == asked
    assert most == 2


def test_a_model_that_is_idle_leaves(models: Stack) -> None:
    ask(models, "blue")
    assert eventually(lambda: states(models)["blue"] == "unloaded")
    assert ask(models, "blue") == ("blue", 8)


def test_an_engine_killed_in_the_middle_of_its_load_costs_nobody_an_answer(models: Stack) -> None:
    assert eventually(lambda: states(models)["blue"] == "unloaded")
    before = {each.pid for each in engines(models)}
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(ask, models, "blue") for _ in range(3)]
        assert eventually(lambda: any(each.pid not in before for each in engines(models)))
        (loading,) = [each for each in engines(models) if each.pid not in before]
        loading.send_signal(signal.SIGKILL)
        assert [each.result() for each in running] == [("blue", 8)] * 3


def test_an_unknown_model_is_refused_by_its_name(models: Stack) -> None:
    with pytest.raises(openai.NotFoundError, match="'yellow' is not served here; available: red"):
        ask(models, "yellow")


def test_a_model_larger_than_the_memory_is_refused_by_its_name(tmp_path: Path) -> None:
    config = f"{CONFIG}\n[supervisor]\non_demand_bytes = 1000000\n{MODELS}"
    (tmp_path / "millrace.toml").write_text(config)
    stack = start_stack(tmp_path, model=None)
    try:
        assert stack.process.wait(LIMIT_S) == 2
    except subprocess.TimeoutExpired:
        stack.process.kill()
        raise
    assert "models.red: its engines take" in stack.transcript()
    assert "supervisor.on_demand_bytes" in stack.transcript()
