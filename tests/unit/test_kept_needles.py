"""`benchmarks.kept_needles`: what an answer is held to is foreseen as if it were echoed, and less well by who
forgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from benchmarks.kept_needles import Model, questions
from contract.retention import Retention
from engine.types import Request, SamplingParams
from services.gate.lines import CaseLine, continued


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    found = Model("bundled", "")
    with closing(found.runner):
        yield found


def test_a_text_is_foreseen_as_it_is_echoed(model: Model) -> None:
    said = "Anna lives in Oslo and works as a baker. " * 4
    case = continued(CaseLine(id="text", text=said + "Anna lives in Oslo."))
    given, rest = case.body["prompt"], case.answer
    assert given + rest == said + "Anna lives in Oslo."
    found = model.say(model.ids(given), None, len(rest), rest)
    assert found.tokens == model.ids(rest)
    request = Request(
        request_id=99,
        external_id="",
        prompt_token_ids=model.ids(given) + found.tokens,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
    )
    scheduler, echoed = model.scheduler, []
    scheduler.submit(request, 0.0)
    while scheduler.has_work:
        scheduler.update(model.runner.launch(scheduler.schedule(1.0)).wait(), 1.0)
        for event in scheduler.drain_events():
            echoed += [each.logprob for each in event.prompt_logprobs]
    np.testing.assert_allclose(found.logprobs, echoed[-len(found.tokens) :], atol=1e-3)


def test_who_forgets_foresees_less(model: Model) -> None:
    ((given, rest),) = questions(1, 1, 1).texts
    tokens = model.ids(given)
    plain, kept = (
        model.say(tokens, each, len(rest), rest)
        for each in (None, Retention(policy="window+sinks", window_tokens=1, max_lost=1.0))
    )
    assert plain.tokens == kept.tokens
    assert plain.logprobs[0] == pytest.approx(kept.logprobs[0], abs=1e-3)
    assert sum(plain.logprobs) > sum(kept.logprobs)
    assert kept.lost > plain.lost == 0
