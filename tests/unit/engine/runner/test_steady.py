"""A decode step that follows another of the same sequences has the arrays that it would have if put together
anew, whatever else happens between the two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.torch_runner import TorchRunner
from engine.runner.verification import LogitRows, logit_rows
from engine.types import SamplingParams, ScheduledSequence
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

SEEDED = SamplingParams(temperature=0.9, seed=3, logprobs=1)


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    make_checkpoint(tmp_path, "qwen3", head_dim=24, max_position_embeddings=1024)
    return open_runner(tmp_path)


def jobs() -> list[Job]:
    """Prompts that reach the end of a block at different steps; some end earlier than others."""
    return [
        Job(prompt_of(5 + 7 * index, 199, seed=index), num_tokens=70 - 9 * (index % 3), sampling=SEEDED)
        for index in range(6)
    ]


def test_it_is_what_would_have_been_put_together(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = runner._steady.following
    compared = 0

    def compare(scheduled: list[ScheduledSequence]) -> tuple[StepInputs, LogitRows] | None:
        nonlocal compared
        found = following(scheduled)
        if found is None:
            return None
        inputs, rows = found
        anew = prepare_inputs(
            scheduled,
            runner.table,
            block_size=runner.storage.block_size,
            spare_slot=runner.storage.spare_slot,
            device=runner.device,
            row_multiple=runner.model.row_multiple,
        )
        rows_anew = logit_rows(anew, runner.table)
        assert inputs.scheduled == anew.scheduled
        assert inputs.states == anew.states
        for ours, theirs in (
            (inputs.slots, anew.slots),
            (inputs.query_starts, anew.query_starts),
            (inputs.batch.token_ids, anew.batch.token_ids),
            (inputs.batch.positions, anew.batch.positions),
            (inputs.batch.slots, anew.batch.slots),
            (inputs.batch.ragged.context_lens, anew.batch.ragged.context_lens),
            (inputs.batch.ragged.block_tables, anew.batch.ragged.block_tables),
            (rows.tokens, rows_anew.tokens),
            (rows.slots, rows_anew.slots),
            (rows.positions, rows_anew.positions),
        ):
            np.testing.assert_array_equal(ours, theirs)
        assert (rows.members, rows.starts) == (rows_anew.members, rows_anew.starts)
        compared += 1
        return found

    monkeypatch.setattr(runner._steady, "following", compare)
    together = Driver(runner, seed=1).run(jobs())
    # All but those that begin a column of the block tables, or follow an end.
    assert compared > 55
    monkeypatch.setattr(runner._steady, "following", lambda scheduled: None)
    anew = Driver(runner, seed=1).run(jobs())
    assert [(job.output, job.logprobs) for job in together] == [(job.output, job.logprobs) for job in anew]


def test_a_sequence_that_comes_back_is_another_one(runner: TorchRunner) -> None:
    """Same number, same position, other blocks and another slot: as after a preemption."""
    steady = runner._steady
    driver = Driver(runner, seed=1)
    driver.run([Job(prompt_of(40, 199, seed=1), num_tokens=4)])
    scheduled = [ScheduledSequence(1, 43, 1, (), True)]
    assert steady.following(scheduled) is None
