"""Prompts computed by one engine and answered by another, in a whole stack; and the loss of the first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import openai
import pytest

from observability.emit import hand_overs
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, Stack, eventually, running_stack
from tests.e2e.test_restarts import is_back_after

pytestmark = needs_weights
SETTINGS = """
[supervisor]
engines = 2
prefill_engines = 1
[gateway.routing]
split_tokens = 64
"""
PROMPT = "The river was wide, and nobody had crossed it before the bridge was built. " * 24
# The first engine that the supervisor starts.
SENDER = "engine-0"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("pair"), config=CONFIG + SETTINGS) as stack:
        yield stack
        stack.assert_nothing_leaked()


def ask(stack: Stack, salt: str, **more: Any) -> Any:
    """An answer whose prompt is cached for nobody else."""
    with stack.openai() as client:
        return client.completions.create(
            model=stack.model,
            prompt=PROMPT,
            max_tokens=40,
            seed=11,
            temperature=0.9,
            extra_body={"cache_salt": salt, "ignore_eos": True},
            **more,
        )


def splits(stack: Stack, outcome: str) -> float:
    return sum(each.value(hand_overs.SPLITS, outcome=outcome) for each in stack.metrics("gateway"))


@contextmanager
def answering_others(stack: Stack) -> Iterator[None]:
    """Answers that would suffer from prompts on their engine, so that prompts are computed by the other."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with suppress(openai.APIError), stack.openai() as client:
                for _ in client.completions.create(
                    model=stack.model,
                    prompt="Once",
                    max_tokens=400,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    if stop.is_set():
                        return

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
    for each in readers:
        each.result()


def test_the_answer_is_that_of_one_engine_and_one_prompt_is_billed(pair: Stack) -> None:
    answers = [ask(pair, "whoever answers")]
    with answering_others(pair):

        def is_split() -> bool:
            """Forecasts decide, which a busy machine makes err."""
            name = f"split-{len(answers)}"
            before = splits(pair, "handed_over")
            answers.append(ask(pair, name, extra_headers={"x-request-id": name}))
            return eventually(lambda: splits(pair, "handed_over") > before, 1.0)

        assert eventually(is_split)
    assert len({each.choices[0].text for each in answers}) == 1
    assert all(each.usage == answers[0].usage for each in answers)
    pair.trace(f"split-{len(answers) - 1}", (hand_overs.GATEWAY_HAND_OVER,))
    assert sum(each.value(hand_overs.BYTES, direction="in") for each in pair.metrics("engine")) > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_answers_do_not_show_the_loss_of_the_engine_that_computes_prompts(
    pair: Stack, number: signal.Signals
) -> None:
    expected = ask(pair, f"expected {number}").choices[0].text
    with answering_others(pair), ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, pair, f"{number} {each}") for each in range(8)]
        again = is_back_after(pair, SENDER, number)
        answers = [each.result() for each in asking]
    assert again, pair.transcript()
    assert [each.choices[0].text for each in answers] == [expected] * 8
    assert len({each.usage.prompt_tokens for each in answers}) == 1
    pair.assert_nothing_leaked()
