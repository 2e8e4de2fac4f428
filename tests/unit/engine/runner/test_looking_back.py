"""What lookups would have brought is found out in answers that have ended, and ends a rest where they pay."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.proposer import Proposer
from engine.speculation_config import SpeculationConfig
from engine.types import NewSequence, SamplingParams
from kernels.host import HOST
from tests.unit.engine.runner.virtual_drafts import Clock

VOCAB = 1_000
PLAIN_S, LOOK_S = 1.0, 0.3


def resting() -> Economics:
    """After plain steps of one sequence behind which looking was dear and brought nothing."""
    economics = Economics(4, 0.1)
    step(economics)
    economics.times.add(1, 4, 1.2 * PLAIN_S)
    while not _rest_of(economics):
        step(economics)
    return economics


def step(economics: Economics, num_accepted: int = 0) -> bool:
    """A step; whether somebody looked behind it."""
    if economics.passes(1) or economics.rests(1, PLAIN_S, is_plain=not num_accepted, has_drafts=False):
        return False
    economics.stepped(
        StepCost(
            seconds=PLAIN_S,
            num_sequences=1,
            num_drafts=num_accepted,
            num_accepted=num_accepted,
            decodes_only=True,
        )
    )
    economics.took(LOOK_S)
    return not economics.is_resting


def _rest_of(economics: Economics) -> int:
    return economics._sizes[1].num_resting if 1 in economics._sizes else 0


def test_where_what_was_found_would_have_paid_the_rest_is_over() -> None:
    economics = resting()
    step(economics)
    economics.may_wake("a", num_lookups=10, num_held=25)
    assert step(economics)


@pytest.mark.parametrize(("num_lookups", "num_held"), [(0, 0), (10, 0), (10, 2)])
def test_where_it_would_not_have_paid_nobody_looks(num_lookups: int, num_held: int) -> None:
    economics = resting()
    step(economics)
    before = _rest_of(economics)
    economics.may_wake("a", num_lookups, num_held)
    assert _rest_of(economics) == before > 0


def test_rests_that_are_ended_in_vain_are_ended_ever_more_rarely_until_one_pays() -> None:
    economics = resting()
    num_woken = 0
    for _ in range(200):
        for _ in range(40):
            step(economics)
        before = _rest_of(economics)
        economics.may_wake("a", num_lookups=10, num_held=25)
        num_woken += before > 0 and not _rest_of(economics)
    assert 3 <= num_woken <= 8
    while not step(economics):
        pass
    # A single step that gains makes no difference, while most lose.
    step(economics, num_accepted=1)
    while not _rest_of(economics):
        step(economics)
    assert economics._sizes[1].num_unheard > 0
    economics._sizes[1].num_unheard = 0
    economics.may_wake("a", num_lookups=10, num_held=25)
    for _ in range(10):
        step(economics, num_accepted=4)
    while not _rest_of(economics):
        step(economics)
    economics.may_wake("a", num_lookups=10, num_held=25)
    # As after the first one: the next is not put off.
    assert not _rest_of(economics)
    assert not economics._sizes[1].num_unheard


class Told:
    """An engine's proposer, told of answers that have ended."""

    def __init__(self, method: str, **speculation: Any) -> None:
        self.clock = Clock()
        config = SpeculationConfig(method=cast(Any, method), **speculation)
        self.proposer = Proposer(config, clock=self.clock)
        self.economics = self.proposer.economics
        for _ in range(20):
            step(self.economics)
        self.table = SequenceTable(vocab_size=VOCAB, max_model_len=512, device=HOST, grammar=cast(Any, None))
        self._numbers = iter(range(1_000))

    def ended(self, owner: str, answer: list[int]) -> None:
        number = next(self._numbers)
        self.table.add(
            NewSequence(
                sequence_id=number,
                token_ids=(1, 2, 3),
                num_prompt_tokens=3,
                sampling=SamplingParams(max_tokens=len(answer), ignore_eos=True),
                choice_index=0,
                grammar=None,
                adapter="",
                block_ids=(),
                tenant=owner,
            )
        )
        state = self.table.states[number]
        self.table.append(state.slot, tuple(answer))
        self.proposer.ended(state, self.table)
        self.table.release(number)

    def expects(self, owner: str) -> float:
        """Share of lookups that find something that holds, before any of a sequence's own."""
        known = self.economics.owners.of(owner)
        return known.found * known.acceptance.share(0, 2.0, known.acceptance)


def test_answers_that_repeat_are_worth_lookups_to_their_owner_alone() -> None:
    told = Told("suffix")
    answer = np.random.default_rng(1).integers(10, VOCAB, 200).tolist()
    before = told.expects("one")
    for _ in range(30):
        told.ended("one", answer)
        told.ended("other", np.random.default_rng().integers(10, VOCAB, 200).tolist())
    assert told.expects("one") > 0.8
    assert told.expects("other") < before / 2
    assert told.expects("third") == before


def test_looking_back_ends_with_its_time() -> None:
    told = Told("ngram")
    drafter, asked = told.proposer.drafter, 0
    assert drafter is not None

    def slow(*arguments: Any) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        told.clock.now += PLAIN_S
        return ()

    drafter.drafts_after = slow  # type: ignore[method-assign]
    told.ended("one", list(range(10, 310)))
    assert asked == 1


def test_whoever_always_drafts_does_not_look_back() -> None:
    told = Told("ngram", min_acceptance=0.0)
    assert told.proposer.drafter is not None
    told.proposer.drafter.drafts_after = None  # type: ignore[method-assign,assignment]
    told.ended("one", list(range(10, 310)))
