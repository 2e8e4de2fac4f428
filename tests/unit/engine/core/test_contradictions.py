"""Options that leave no token to choose, on the bundled model with the real scheduler and runner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import llguidance
import pytest
from tokenizers import Tokenizer

from engine.config import CacheConfig, SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import GrammarSpec, Request, SamplingParams, TokenEvent
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import open_runner

BUNDLED = Path("models/millrace-nano")
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("The colour of the sky is", add_special_tokens=False).ids)
DIGITS = GrammarSpec(
    digest="", payload=llguidance.grammar_from("regex", "[0-9]x").encode(), backend="llguidance/1"
)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    opened = open_runner(BUNDLED)
    yield opened
    opened.close()


def token_of(text: str) -> int:
    (token,) = TOKENIZER.encode(text, add_special_tokens=False).ids
    return int(token)


def run(runner: ModelRunner, *jobs: tuple[SamplingParams, GrammarSpec | None]) -> dict[int, list[TokenEvent]]:
    """The events of each request, by its place; all run beside each other."""
    memory = memory_plan(64, runner.storage.block_size, 256)
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), memory, model="m")
    for number, (sampling, grammar) in enumerate(jobs):
        request = Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=PROMPT,
            sampling=sampling,
            grammar=grammar,
        )
        scheduler.submit(request, 0.0)
    events: dict[int, list[TokenEvent]] = {number: [] for number in range(len(jobs))}
    while scheduler.has_work:
        scheduler.update(runner.launch(scheduler.schedule(0.0)).wait(), 0.0)
        for event in scheduler.drain_events():
            events[event.request_id].append(event)
        scheduler.check_invariants()
    return events


@pytest.mark.parametrize(
    ("allowed", "num_tokens"),
    [(("b",), 0), (("1", "2"), 1)],
    ids=["at the first token", "at the second token"],
)
def test_allowed_tokens_that_the_grammar_excludes_are_named(
    runner: ModelRunner, allowed: tuple[str, ...], num_tokens: int
) -> None:
    ids = tuple(map(token_of, allowed))
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    contradiction = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=ids)
    events = run(runner, (contradiction, DIGITS), (plain, None))
    failure = events[0][-1].failure
    assert failure is not None
    assert (failure.reason, failure.field) == ("INVALID_ARGUMENT", "sampling.allowed_token_ids")
    assert failure.message.startswith("sampling.allowed_token_ids: no token is allowed")
    assert "the grammar" in failure.message
    assert "leave one of them out" in failure.message
    assert sum(len(event.token_ids) for event in events[0]) == num_tokens
    # The one beside it is not affected.
    assert events[1]
    assert not any(event.failure for event in events[1])


def test_without_a_grammar_the_options_that_exclude_each_other_are_named(runner: ModelRunner) -> None:
    token = token_of("b")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=4, allowed_token_ids=(token,), logit_bias={token: -math.inf}
    )
    failure = run(runner, (sampling, None))[0][-1].failure
    assert failure is not None
    assert failure.field == "sampling.allowed_token_ids"
    assert "and by logit_bias at this position" in failure.message


def test_allowed_tokens_that_the_grammar_takes_are_no_contradiction(runner: ModelRunner) -> None:
    ids = (token_of("7"), token_of("x"))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=ids)
    events = run(runner, (sampling, DIGITS))[0]
    assert not any(event.failure for event in events)
    assert tuple(token for event in events for token in event.token_ids)[:2] == ids
