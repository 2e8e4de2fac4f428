"""A way to draft that does not pay is left alone: hardly a step looks for drafts, nothing is kept of the
others, and they are computed as they are without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from engine.runner.inputs import StepInputs
from engine.runner.runner import ModelRunner
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.features import FeatureDrafter
from engine.speculation_config import SpeculationConfig
from engine.types import ScheduledSequence
from services.drafter.lessons import Lesson
from tests.unit.engine.runner.drafting import poison_head, speculating, totals
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

HEADS = ["eagle3", "medusa"]


class Steps:
    """Plain steps of one second in virtual time, behind each of which looking takes so long."""

    def __init__(self, look_s: float, *, accepts: int = 0) -> None:
        self.economics = Economics(4, 0.1, wakes_early=True)
        self.look_s, self.accepts = look_s, accepts
        self.num_looks = self.num_kept = 0
        self.lost_s = 0.0

    def run(self, num_steps: int, num_sequences: int = 1) -> None:
        economics = self.economics
        for _ in range(num_steps):
            if economics.passes(num_sequences):
                continue
            if economics.rests(num_sequences, 1.0, is_plain=not self.accepts, has_drafts=False):
                self.num_kept += economics.is_waking
                continue
            step = StepCost(
                seconds=1.0,
                num_sequences=num_sequences,
                num_drafts=self.accepts,
                num_accepted=self.accepts,
                decodes_only=True,
            )
            economics.stepped(step)
            if not economics.is_resting:
                self.num_looks += 1
                self.lost_s += self.look_s
                economics.took(self.look_s)


@pytest.mark.parametrize("look_s", [0.001, 0.02, 0.2, 5.0])
def test_what_never_pays_takes_half_a_percent_whatever_a_look_costs(look_s: float) -> None:
    steps = Steps(look_s)
    steps.run(2_000)
    steps.lost_s = 0.0
    steps.num_looks = steps.num_kept = 0
    steps.run(20_000)
    assert 0 < steps.lost_s <= 0.0055 * 20_000
    if look_s > 0.01:
        # Those that are felt are too few for a 99th percentile.
        assert steps.num_looks < 0.009 * 20_000
        assert steps.num_kept < 0.3 * 20_000


def test_what_pays_is_not_interrupted_and_comes_back_after_a_rest() -> None:
    steps = Steps(0.2)
    steps.run(2_000)
    steps.accepts, steps.num_looks = 2, 0
    steps.run(2_000)
    assert steps.num_looks > 1_500
    before = steps.num_looks
    steps.run(1_000)
    assert steps.num_looks - before == 1_000


def test_batches_of_other_sizes_rest_for_themselves() -> None:
    steps = Steps(0.2)
    steps.run(400)
    resting = steps.economics._sizes[1].num_resting + steps.economics._num_passing
    assert resting
    looks = steps.num_looks
    steps.run(3, num_sequences=8)
    assert steps.num_looks > looks
    # What had not passed yet is not lost.
    assert steps.economics._sizes[1].num_resting == resting


def test_whoever_always_drafts_never_rests() -> None:
    economics = Economics(4, 0.0)
    for _ in range(100):
        assert not economics.passes(1)
        assert not economics.rests(1, 1.0, is_plain=True, has_drafts=False)
        economics.took(3.0)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=0, decodes_only=True))


class Watch:
    """Counts what a runner's drafter is asked for, and steps that are put together as a whole."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.seen = self.prepared = 0
        drafter = runner.proposer.drafter
        assert drafter is not None
        propose, saw, prepare = drafter.propose, drafter.saw, runner.executor.prepare

        def count_propose(
            states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
        ) -> list[tuple[int, ...]]:
            self.asked += 1
            return propose(states, counts, table)

        def count_saw(inputs: Any, table: SequenceTable) -> None:
            self.seen += 1
            saw(inputs, table)

        def count_prepare(scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
            self.prepared += 1
            return prepare(scheduled, ahead=ahead)

        monkeypatch.setattr(runner.executor, "prepare", count_prepare)
        monkeypatch.setattr(drafter, "propose", count_propose)
        monkeypatch.setattr(drafter, "saw", count_saw)


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "lookahead", "eagle3", "medusa"])
def test_while_nobody_looks_steps_follow_each_other_and_no_drafter_is_asked(
    method: str, folder: Path, trained_head: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step takes on this machine: that there is nothing in the purse is said beforehand."""
    speculation = SpeculationConfig(
        method=method,  # type: ignore[arg-type]
        draft_model=str(trained_head(method) if method in HEADS else folder),
    )
    jobs = [Job(prompt_of(9, 199, seed=seed) * 3, num_tokens=40, speculate=True) for seed in range(4)]
    with closing(open_runner(folder, speculation=speculation)) as runner:
        watch = Watch(runner, monkeypatch)
        runner.proposer.economics._costs(4).num_resting = 10_000
        Driver(runner).run(jobs)
        assert (watch.asked, watch.seen) == (0, 0)
        assert totals(jobs) == (0, 0)
        # As many steps as tokens, all but the first few of which followed the one before as without drafts.
        assert [job.num_steps for job in jobs] == [40] * 4
        assert 0 < watch.prepared <= 3


@pytest.mark.parametrize("method", HEADS)
def test_a_head_that_missed_steps_drafts_on_from_what_it_knows_and_nothing_changes(
    method: str, folder: Path, trained_head: Callable[..., Path], lessons: list[Lesson]
) -> None:
    """Rests of different lengths in the middle of answers."""
    speculation = speculating(trained_head(method))

    def jobs_of(*, speculate: bool) -> list[Job]:
        return [Job(list(each.ids[: each.num_given]), num_tokens=40, speculate=speculate) for each in lessons]

    class Interrupted(Driver):
        """Now and then nobody looks for some steps."""

        random = np.random.default_rng(3)

        def step(self, plan: Any) -> Any:
            economics, draw = self.runner.proposer.economics, self.random.random()
            costs = economics._costs(len(plan.scheduled))
            if plan.scheduled and draw < 0.3 and not costs.num_resting:
                costs.num_resting = int(self.random.integers(1, 70))
            return super().step(plan)

    with closing(open_runner(folder, speculation=speculation, cache={"block_size": 4})) as runner:
        poison_head(runner)
        plain = Driver(runner).run(jobs_of(speculate=False))
        driver = Interrupted(runner, seed=1)
        found = [driver.run(jobs_of(speculate=True)) for _ in range(6)]
        drafter = runner.proposer.drafter
        assert isinstance(drafter, FeatureDrafter)
        assert (drafter.read <= drafter.seen).all()
    for jobs in found:
        assert [job.output[:40] for job in jobs] == [job.output for job in plain]
    num_drafted, num_accepted = (sum(each) for each in zip(*map(totals, found), strict=True))
    assert 0 < num_accepted < num_drafted
