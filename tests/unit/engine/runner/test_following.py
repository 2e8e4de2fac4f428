"""A decode step that follows another of the same sequences has the arrays that it would have if put together
anew, whatever else happens between the two.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.retention import Retention
from engine.runner.base import PendingStep
from engine.runner.executors.executor import FollowingSteps, LastStep
from engine.runner.executors.native import NativeDecode, NativeExecutor
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.outcomes import LogitRows, Sampled, logit_rows
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams, ScheduledSequence, SchedulerOutput, TokenLogprobs
from kernels.sampling.native import sampling_library
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.test_retention import BLOCK, NUM_TOKENS, generate

SEEDED = SamplingParams(temperature=0.9, seed=3, logprobs=1)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SEEDED,
    SamplingParams(temperature=1.2, seed=5, top_k=20, top_p=0.9, frequency_penalty=0.7),
    SamplingParams(temperature=0.8, seed=1, logit_bias={3: 4.0}, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=1, min_tokens=5, stop_token_ids=(3, 4), presence_penalty=0.5),
]
needs_native = pytest.mark.skipif(sampling_library() is None, reason="there are no native kernels")


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    make_checkpoint(tmp_path, "qwen3", head_dim=24, max_position_embeddings=1024)
    return open_runner(tmp_path)


def steps_of(runner: ModelRunner) -> FollowingSteps:
    assert isinstance(runner.executor, NativeExecutor)
    return runner.executor.steps


def decode_of(runner: ModelRunner) -> NativeDecode:
    assert isinstance(runner.executor, NativeExecutor)
    assert runner.executor.decode is not None
    return runner.executor.decode


def jobs(sampling: SamplingParams = SEEDED) -> list[Job]:
    """Prompts that reach the end of a block at different steps; some end earlier than others."""
    return [
        Job(prompt_of(5 + 7 * index, 199, seed=index), num_tokens=70 - 9 * (index % 3), sampling=sampling)
        for index in range(6)
    ]


def anew(runner: ModelRunner, scheduled: list[ScheduledSequence]) -> tuple[StepInputs, LogitRows]:
    """The step put together as a whole."""
    inputs = prepare_inputs(
        scheduled,
        runner.table,
        runner.storage,
        runner.model,
    )
    return inputs, logit_rows(inputs)


def assert_same(ours: tuple[StepInputs, LogitRows], theirs: tuple[StepInputs, LogitRows]) -> None:
    (inputs, rows), (inputs_anew, rows_anew) = ours, theirs
    assert inputs.states == inputs_anew.states
    tables, tables_anew = inputs.batch.ragged.block_tables, inputs_anew.batch.ragged.block_tables
    columns = tables_anew.shape[1]
    assert not tables[:, columns:].any()
    # What lies behind a shorter sequence's blocks is nobody's.
    seen = np.arange(columns) * BLOCK < inputs_anew.batch.ragged.context_lens[:, None]
    for mine, other in (
        (inputs.slots, inputs_anew.slots),
        (inputs.query_starts, inputs_anew.query_starts),
        (inputs.batch.token_ids, inputs_anew.batch.token_ids),
        (inputs.batch.positions, inputs_anew.batch.positions),
        (inputs.batch.slots, inputs_anew.batch.slots),
        (inputs.batch.ragged.context_lens, inputs_anew.batch.ragged.context_lens),
        (np.where(seen, tables[:, :columns], 0), np.where(seen, tables_anew, 0)),
        (rows.tokens, rows_anew.tokens),
        (rows.slots, rows_anew.slots),
        (rows.positions, rows_anew.positions),
    ):
        np.testing.assert_array_equal(mine, other)
    assert (rows.members, rows.starts) == (rows_anew.members, rows_anew.starts)


def outcomes(done: list[Job]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    return [(job.output, job.logprobs) for job in done]


def run_anew(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, wanted: list[Job]) -> list[Job]:
    """Every step put together as a whole."""
    with monkeypatch.context() as patched:
        patched.setattr(steps_of(runner), "follows", lambda scheduled: None)
        return Driver(runner, seed=1).run(wanted)


def compared(runner: ModelRunner, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Has each step that follows compared with what would have been put together; counts both kinds."""
    decode, executor = decode_of(runner), runner.executor
    run, launch, prepare = decode.run, runner.launch, executor.prepare
    plans: list[SchedulerOutput] = []
    counts: Counter[str] = Counter()

    def compare(last: LastStep) -> Sampled:
        expected = anew(runner, list(plans[-1].scheduled))
        step = run(last)
        assert_same((last.inputs, last.rows), expected)
        counts["following"] += 1
        return step

    def note(plan: SchedulerOutput) -> PendingStep:
        plans.append(plan)
        return launch(plan)

    def count(scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        counts["whole"] += 1
        return prepare(scheduled, ahead=ahead)

    patch.setattr(runner, "launch", note)
    patch.setattr(decode, "run", compare)
    patch.setattr(executor, "prepare", count)
    return counts


@needs_native
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_native_step_is_what_would_have_been_put_together(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    counts = compared(runner, monkeypatch)
    together = Driver(runner, seed=1).run(jobs(sampling))
    # All but those that follow an end or wait for min_tokens.
    assert counts["following"] > 55
    assert outcomes(together) == outcomes(run_anew(runner, monkeypatch, jobs(sampling)))


FORGETTING = {
    # Each block that is begun hides another one.
    "window+sinks": Retention(policy="window+sinks", keep=0.4),
    "few": Retention(policy="window+sinks", window_tokens=1),
    # Begins to forget on the way.
    "late": Retention(policy="window+sinks", window_tokens=160),
    "snapkv": Retention(policy="snapkv", keep=0.4),
    "h2o": Retention(policy="h2o", keep=0.5),
}


@needs_native
@pytest.mark.parametrize("names", [*((name, name) for name in FORGETTING), tuple(FORGETTING)], ids=" ".join)
def test_answers_that_forget_follow_as_others_do(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    asked: list[tuple[list[int], Retention | None]] = [
        (prompt_of(100 + 9 * number, 199, seed=number), FORGETTING[name]) for number, name in enumerate(names)
    ]
    given: dict[str, Any] = {"prefix_caching": False, "max_num_batched_tokens": 1024}
    with monkeypatch.context() as patched:
        counts = compared(runner, patched)
        together, _ = generate(runner, asked_of=asked, **given)
        num_following, num_whole = counts["following"], counts["whole"]
        counts.clear()
        generate(runner, asked_of=[(prompt, None) for prompt, _ in asked], **given)
    # One more where an answer begins to forget: the step that does, or none, and the one behind it.
    begins = 2 * sum(name in ("late", "window+sinks", "few") for name in names)
    assert num_whole <= counts["whole"] + begins
    assert num_following >= counts["following"] - begins
    assert num_following > NUM_TOKENS / 2
    with monkeypatch.context() as patched:
        patched.setattr(steps_of(runner), "follows", lambda scheduled: None)
        assert generate(runner, asked_of=asked, **given)[0] == together


@needs_native
def test_a_measured_answer_is_put_together_step_by_step(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's queries are seen before they attend."""
    asked = Retention(policy="snapkv", keep=0.4, max_lost=1.0)
    counts = compared(runner, monkeypatch)
    generate(runner, asked_of=[(prompt_of(100, 199, seed=1), asked)] * 2, prefix_caching=False)
    assert counts["whole"] > NUM_TOKENS
    assert not counts["following"]


@needs_native
def test_a_sequence_outgrows_the_table_in_a_native_step(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens fill the table's columns up and go on behind them; a neighbour's row begins there."""
    columns = runner.table.tokens.shape[1]

    def long() -> list[Job]:
        return [
            Job(prompt_of(columns - 9 - index, 199, seed=index), num_tokens=24, sampling=SEEDED)
            for index in range(3)
        ]

    together = Driver(runner, seed=1).run(long())
    # Rows of ended sequences stay as they were.
    rows = runner.table.tokens.copy()
    assert rows.shape[1] > columns
    for slot, job in enumerate(together):
        known = job.prompt + job.output
        np.testing.assert_array_equal(rows[slot, : len(known)], known)
    assert outcomes(together) == outcomes(run_anew(runner, monkeypatch, long()))


@needs_native
def test_a_step_in_which_a_draw_fails_appends_nothing_natively(runner: ModelRunner) -> None:
    """Logits that are not finite end one sequence; the others go on with the tokens that they would have."""
    driver = Driver(runner, seed=1)
    alone = [job.output for job in driver.run(jobs())]
    decode = decode_of(runner)
    run, num_runs = decode.run, 0

    def poisoned(last: LastStep) -> Sampled | None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 7:
            # Keys and values of its first block.
            block = runner.table.blocks[last.inputs.slots[2], 0]
            for layer in runner.storage.layers:
                for tensor in layer.tensors():
                    tensor[block] = float("nan")
        return run(last)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "run", poisoned)
        together = Driver(runner, seed=1).run(jobs())
    failed = [bool(job.failure) for job in together]
    assert failed == [index == 2 for index in range(6)], [job.failure for job in together]
    # The prompt's step and the first that decodes are put together as a whole.
    assert len(together[2].output) == 2 + 6
    for index, job in enumerate(together):
        assert job.output == alone[index][: len(job.output)]
        assert failed[index] or len(job.output) == job.num_tokens


def test_a_sequence_that_comes_back_is_another_one(runner: ModelRunner) -> None:
    """Same number, same position, other blocks and another slot: as after a preemption."""
    driver = Driver(runner, seed=1)
    driver.run([Job(prompt_of(40, 199, seed=1), num_tokens=4)])
    scheduled = [ScheduledSequence(1, 43, 1, (), True)]
    assert runner.executor.following(scheduled) is None
