"""Steps that wait for nothing give what steps executed one by one give, captured or eager."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, GraphsConfig, SchedulerConfig
from engine.runner.cuda.build import make_device_runner
from engine.runner.cuda.decode_graphs import ladder
from engine.runner.runner import ModelRunner
from engine.speculation_config import SpeculationConfig
from engine.types import SamplingParams, ScheduledSequence, SchedulerOutput, StepResult
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.cuda.doubles import (
    AddressChangedError,
    CapturableAttention,
    CheckedRecorder,
    HostReadError,
)
from tests.unit.engine.runner.drafting import BUNDLED, GRAMMAR, SAMPLINGS
from tests.unit.engine.runner.driver import (
    GREEDY,
    Driver,
    Job,
    generated,
    new_sequence,
    open_runner,
    prompt_of,
)

VOCAB = 199
MAX_LEN = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", max_position_embeddings=MAX_LEN)
    return path


def open_device_runner(
    folder: Path,
    *,
    graphs: str = "auto",
    max_num_seqs: int = 24,
    recorder: CheckedRecorder | None = None,
    **options: Any,
) -> ModelRunner:
    """A runner of GPUs on the CPU, over NaN-poisoned blocks."""
    plain = open_runner(
        folder, **({"native": "off", "attention_backend": "torch", "kv_cache_bytes": 8 << 20} | options)
    )
    config = EngineConfig(
        graphs=GraphsConfig(decode=graphs),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        speculation=options.get("speculation", SpeculationConfig()),
    )
    spec = plain.model.spec
    return make_device_runner(
        config,
        plain.model,
        CapturableAttention(num_heads=spec.num_heads, num_kv_heads=spec.cache_heads),
        recorder=lambda device: recorder or CheckedRecorder(),
        storage=plain.storage,
        grammar=plain.grammar,
        proposer=plain.proposer,
        native_sampling=False,
    )


def job_of(seed: int) -> Job:
    """Any kind of request that needs no host."""
    dice = random.Random(seed)
    sampling = GREEDY
    if seed % 3:
        sampling = SamplingParams(
            temperature=dice.choice([0.3, 1.0]),
            top_p=dice.choice([0.7, 1.0]),
            seed=seed,
            max_tokens=64,
            frequency_penalty=0.5 if seed % 2 else 0.0,
            repetition_penalty=1.2 if seed % 5 == 0 else 1.0,
            logprobs=2 if seed % 4 == 0 else None,
        )
    return Job(
        prompt_of(dice.randint(1, 40), VOCAB, seed=seed),
        dice.randint(1, 12),
        sampling,
        chunk=dice.choice([5, 100]),
    )


class OverlappedDriver(Driver):
    """Launches a step before the one before it was read, as the engine's loop does with overlap: sequences
    start and end at any time, and slots change hands while steps are on their way.
    """

    def drive(self, jobs: list[Job], seed: int, *, most: int, cancels: float = 0.0) -> None:
        dice = random.Random(seed)
        waiting, live = list(jobs), {}
        pending: tuple[Any, list[tuple[int, Job, bool]]] | None = None
        ended: list[int] = []
        while waiting or live or pending or ended:
            new = []
            while waiting and len(live) < most and dice.random() < 0.6:
                job = waiting.pop()
                sequence_id = next(self._ids)
                own = self.take_blocks(len(job.prompt) + job.num_tokens + 2)
                live[sequence_id] = [job, own, 0, len(job.prompt), False]
                first = own[: -(-len(job.prompt) // self.runner.storage.block_size)]
                new.append(new_sequence(sequence_id, job, first))
            if live and dice.random() < cancels:
                # Cancelled while its last step is on its way; the slot may be somebody else's at once.
                sequence_id = dice.choice(list(live))
                self._free.extend(live.pop(sequence_id)[1])
                ended.append(sequence_id)
            scheduled, rows = [], []
            for sequence_id, entry in list(live.items()):
                job, own, computed, known, done = entry
                if done or (dice.random() < 0.2 and computed):
                    continue
                count = min(known - computed, job.chunk)
                samples = computed + count == known
                size = self.runner.storage.block_size
                before = max(-(-len(job.prompt) // size), -(-computed // size))
                after = max(before, -(-(computed + count) // size))
                scheduled.append(
                    ScheduledSequence(sequence_id, computed, count, tuple(own[before:after]), samples)
                )
                rows.append((sequence_id, job, samples))
                entry[2] += count
                entry[3] += samples
                entry[4] = entry[3] - len(job.prompt) >= job.num_tokens
            launched = self.runner.launch(
                SchedulerOutput(next(self._steps), tuple(new), tuple(scheduled), tuple(ended))
            )
            ended = []
            if pending is not None:
                self._read(*pending, live, ended)
            pending = (launched, rows)
            if not scheduled and not waiting and not live:
                self._read(*pending, live, ended)
                pending = None

    def _read(self, launched: Any, rows: Any, live: Any, ended: list[int]) -> None:
        result = launched.wait()
        assert not result.failure
        found = {outcome.sequence_id: outcome for outcome in result.results}
        for sequence_id, job, samples in rows:
            if not samples or sequence_id not in live:
                continue
            outcome = found[sequence_id]
            assert not outcome.failure, outcome.failure
            job.output.extend(outcome.token_ids)
            job.logprobs.extend(outcome.logprobs)
            if len(job.output) == job.num_tokens or outcome.grammar_finished:
                ended.append(sequence_id)
                self._free.extend(live.pop(sequence_id)[1])


def expected_of(folder: Path, jobs: list[Job]) -> list[Job]:
    """The same jobs by the plain runner, all in one batch."""
    return generated(
        folder,
        [replace(job, output=[], logprobs=[], prompt_logprobs=[]) for job in jobs],
        native="off",
        attention_backend="torch",
        kv_cache_bytes=8 << 20,
    )


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_overlapped_steps_draw_the_same_tokens(folder: Path, graphs: str, seed: int) -> None:
    recorder = CheckedRecorder()
    runner = open_device_runner(folder, graphs=graphs, recorder=recorder)
    jobs = [job_of(100 * seed + number) for number in range(40)]
    OverlappedDriver(runner, seed=seed).drive(jobs, seed, most=20, cancels=0.3)
    expected = expected_of(folder, jobs)
    assert sum(len(job.output) < job.num_tokens for job in jobs) > 2
    for job, other in zip(jobs, expected, strict=True):
        # Those that were cancelled have the beginning.
        assert job.output == other.output[: len(job.output)]
        del other.logprobs[len(job.logprobs) :]
    for job, other in zip(jobs, expected, strict=True):
        assert [each.token_id for each in job.logprobs] == [each.token_id for each in other.logprobs]
        np.testing.assert_allclose(
            [each.logprob for each in job.logprobs], [each.logprob for each in other.logprobs], atol=1e-4
        )
        assert [each.top_ids for each in job.logprobs] == [each.top_ids for each in other.logprobs]
    replays = [recording.num_replays for recording in recorder.recordings]
    assert (sum(replays) > 0) == (graphs == "auto")
    runner.close()


def test_decode_rows_beside_prompts_have_the_bits_that_they_have_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for beside in (False, True):
        runner = open_device_runner(folder, kv_cache_bytes=1 << 20)
        forward, eager, hidden = runner.model.forward, [], []

        def watched(batch: Any, *rest: Any, forward: Any = forward, eager: list[int] = eager) -> torch.Tensor:
            eager.append(int(batch.ragged.query_starts[-1]))
            return forward(batch, *rest)

        monkeypatch.setattr(runner.model, "forward", watched)
        for step in range(6):
            new = [new_sequence(1, Job([5, 6, 7]), [3])] if not step else []
            scheduled = [ScheduledSequence(1, 0, 3, (), True) if not step else _next(1, step + 2)]
            if beside and step == 1:
                new.append(new_sequence(2, Job(list(range(90))), range(10, 16)))
            if beside and step:
                # A prompt in chunks, its rows first in the plan; in the end it decodes as well.
                chunk = ScheduledSequence(2, 30 * (step - 1), 30, (), step == 3)
                scheduled.insert(0, chunk if step < 4 else _next(2, 86 + step))
            result = runner.launch(SchedulerOutput(step, tuple(new), tuple(scheduled))).wait()
            assert {each.sequence_id for each in result.results if each.token_ids} >= {1}
            hidden.append((result.results, runner.executor.graphs.hidden[:2].clone()))
        assert eager == ([3, 30, 30, 30] if beside else [3])
        found.append([rows[int(step > 3 and beside)] for step, (_, rows) in enumerate(hidden)])
        runner.close()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _next(sequence_id: int, start: int) -> ScheduledSequence:
    return ScheduledSequence(sequence_id, start, 1, (), True)


def test_guided_rows_beside_others() -> None:
    """Their masks wait for the step before; a row launched after the grammar's end counts for nothing."""
    plain = {"native": "off", "attention_backend": "torch", "max_model_len": 256}
    jobs = [
        Job(prompt_of(10 + number, 2000, seed=number), 60, sampling, grammar=GRAMMAR if number % 2 else None)
        for number, sampling in enumerate([*SAMPLINGS, *SAMPLINGS])
    ]
    runner = open_device_runner(BUNDLED, max_num_seqs=8, max_model_len=256)
    OverlappedDriver(runner).drive(jobs, 0, most=6)
    runner.close()
    expected = generated(BUNDLED, [replace(job, output=[], logprobs=[]) for job in jobs], **plain)
    assert [job.output for job in jobs] == [job.output for job in expected]
    assert [job.grammar_finished for job in expected] == [False, True] * 3


def test_padding_disturbs_nobody(folder: Path) -> None:
    runner = open_device_runner(folder)
    driver = Driver(runner)
    # The first blocks are taken, where stray writes would go.
    driver._free = list(range(runner.storage.num_blocks))[::-1]
    for count in (1, 15, 16, 17, 24):
        jobs = [job_of(3 * number) for number in range(count)]
        driver.run(jobs)
        assert [job.output for job in jobs] == [job.output for job in expected_of(folder, jobs)]
    runner.close()


def test_a_poisoned_sequence_fails_alone(folder: Path) -> None:
    runner = open_device_runner(folder)
    jobs = [job_of(3 * number) for number in range(6)]
    jobs[2] = replace(jobs[2], prompt=[VOCAB + 5])
    jobs[4] = replace(jobs[4], sampling=SamplingParams(allowed_token_ids=(3,), logit_bias={3: float("-inf")}))
    Driver(runner).run(jobs)
    assert "outside the vocabulary" in jobs[2].failure
    assert "no token is allowed" in jobs[4].failure
    sound = [jobs[index] for index in (0, 1, 3, 5)]
    assert [job.output for job in sound] == [job.output for job in expected_of(folder, sound)]
    runner.close()


def test_a_step_that_does_not_fit_is_halved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_device_runner(folder, graphs="off")
    forward, sizes = runner.model.forward, []

    def limited(batch: Any, *rest: Any) -> torch.Tensor:
        sizes.append(int(batch.ragged.query_starts[-1]))
        if sizes[-1] > 9:
            raise torch.OutOfMemoryError("out of memory")
        return forward(batch, *rest)

    monkeypatch.setattr(runner.model, "forward", limited)
    driver, halvings = Driver(runner), []
    step = driver.step

    def counted(plan: SchedulerOutput) -> StepResult:
        result = step(plan)
        halvings.append(result.num_halvings)
        return result

    monkeypatch.setattr(driver, "step", counted)
    jobs = [job_of(number) for number in range(12)]
    jobs[0] = replace(
        jobs[0], prompt=prompt_of(40, VOCAB), sampling=SamplingParams(temperature=0.0, prompt_logprobs=1)
    )
    driver.run(jobs)
    monkeypatch.undo()
    expected = expected_of(folder, jobs)
    assert max(sizes) > 9
    # Every cut began with a failure, and the first one of a step was no cut yet.
    assert sum(halvings) == sum(size > 9 for size in sizes) - sum(map(bool, halvings)) > 3
    assert [job.output for job in jobs] == [job.output for job in expected]
    assert [each.token_id for each in jobs[0].prompt_logprobs] == jobs[0].prompt[1:]
    runner.close()


def test_a_single_token_that_does_not_fit_fails_its_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_device_runner(folder, graphs="off")

    def never(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(runner.model, "forward", never)
    plan = SchedulerOutput(0, (new_sequence(1, Job([5, 6]), [3]),), (ScheduledSequence(1, 0, 2, (), True),))
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(plan).wait()
    runner.close()


def test_captured_work_may_not_read_from_the_device() -> None:
    with pytest.raises(HostReadError):
        CheckedRecorder().record(lambda: torch.ones(3).sum().item())


def test_captured_work_keeps_its_buffers() -> None:
    buffers = {"x": torch.ones(3)}
    out = torch.zeros(3)
    recording = CheckedRecorder().record(lambda: out.copy_(buffers["x"] * 2))
    buffers["x"].fill_(4.0)
    recording.replay()
    assert out.tolist() == [8.0] * 3
    buffers["x"] = torch.ones(3)
    with pytest.raises(AddressChangedError):
        recording.replay()


def test_ladders() -> None:
    assert ladder(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert ladder(3) == (1, 2, 3)
    assert ladder(20, multiple=16) == (16, 32)
    assert ladder(64, (4, 100)) == (4, 64)
