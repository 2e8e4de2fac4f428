"""The line of a step's time, and records of an engine's own steps."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from engine.core import step_record
from engine.core.step_record import MeasuredStep, StepRecord, StepShape
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from runtime.errors import ConfigError
from services.simulate.step_model import StepModel, read_record

TRUE = StepModel(0.004, 0.0003, 2e-7, 0.002, 0.00005, 3e-9)


def _steps(noise: float) -> list[MeasuredStep]:
    rng = random.Random(4)
    shapes = []
    for _ in range(400):
        answers, prompt = rng.choice([0, 1, 4, 16, 64]), rng.choice([0, 0, 32, 256, 1024])
        if answers or prompt:
            shapes.append(
                StepShape(answers, prompt, answers * rng.randrange(2000), prompt * rng.randrange(4000))
            )
    return [MeasuredStep(each, TRUE.seconds(each) * (1 + rng.uniform(-noise, noise))) for each in shapes]


def test_a_fit_finds_the_line() -> None:
    found = StepModel.fitted(_steps(0.0))
    assert found[:6] == pytest.approx(TRUE[:6], rel=1e-6)
    assert found.noise == pytest.approx((1.0,) * len(found.noise))


def test_noise_is_what_the_line_leaves_and_is_one_on_average() -> None:
    steps = _steps(0.2)
    found = StepModel.fitted(steps)
    seconds = [found.seconds(each.shape) for each in steps]
    assert seconds == pytest.approx([TRUE.seconds(each.shape) for each in steps], rel=0.05)
    assert sum(found.noise) / len(found.noise) == pytest.approx(1.0)
    assert 0.75 < min(found.noise) < 0.85
    assert 1.15 < max(found.noise) < 1.25
    assert found.factors(1) == found.factors(1) != found.factors(2)
    again = found.resampled(steps, 1)
    assert again != found
    assert again.seconds(steps[0].shape) == pytest.approx(found.seconds(steps[0].shape), rel=0.1)


def test_no_term_is_negative() -> None:
    # Longer contexts that are faster by chance.
    steps = [
        MeasuredStep(
            StepShape(rows, prompt, 1000 * rows - 100 * index, 0.0), 0.01 + 0.001 * rows + 1e-5 * prompt
        )
        for rows in (1, 2, 4)
        for prompt in (0, 100)
        for index in range(5)
    ]
    assert all(term >= 0 for term in StepModel.fitted(steps)[:6])


def test_shapes_of_plans() -> None:
    new = NewSequence(1, (1,) * 40, 40, SamplingParams(), 0, None, "", ())
    rows = (
        ScheduledSequence(1, 8, 32, (), True),
        ScheduledSequence(2, 99, 1, (), True),
        ScheduledSequence(3, 9, 3, (), True, draft_token_ids=(4, 5)),
        ScheduledSequence(4, 0, 1, (), False),
    )
    shape = StepShape.of(SchedulerOutput(1, new_sequences=(new,), scheduled=rows))
    assert shape == StepShape(2, 33, 100 + 12, 32 * (8 + 33 / 2) + 1.0)


def test_an_engine_writes_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a speed that is known: 2 ms a step and 20,000 tokens a second."""
    config, path = tmp_path / "engine.toml", tmp_path / "steps.json"
    config.write_text(
        '[model]\npath = "none"\n[engine]\nsimulated = true\n[engine.scheduler]\nmax_num_seqs = 8\n'
        "[engine.simulation]\nstep_ms = 2\ntokens_per_s = 20000\nnum_blocks = 512\nmax_model_len = 2048\n",
        encoding="utf-8",
    )
    assert step_record.main(["--config", str(config), "--json", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    setup = read_record(path)
    assert setup.scheduler.max_num_seqs == 8
    assert setup.memory.num_blocks == 512
    # No step is shorter than it is told to be; a machine that does something else makes it longer.
    for each in setup.steps:
        assert each.seconds >= 0.002 + (each.shape.num_answers + each.shape.prompt_tokens) / 20_000
    kinds = {(each.shape.num_answers > 0, each.shape.prompt_tokens > 0) for each in setup.steps}
    assert kinds == {(True, False), (False, True), (True, True)}


def test_records_that_cannot_be_meant(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"model": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match="--measure FILE"):
        read_record(path)
    config = tmp_path / "engine.toml"
    config.write_text('[model]\npath = "none"\n[engine]\nsimulated = true\n', encoding="utf-8")
    record = msgspec.structs.replace(step_record.measured(config), steps=())
    path.write_bytes(msgspec.json.encode(record))
    with pytest.raises(ConfigError, match="0 steps with prompts and 0 without"):
        read_record(path)
    bad = msgspec.structs.replace(record, steps=(MeasuredStep(StepShape(1, 0, 1, 0.0), 0.0),))
    path.write_bytes(msgspec.json.encode(bad))
    with pytest.raises(ConfigError, match=r"a step of 0\.0 s"):
        read_record(path)


def test_a_vllm_engine_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "engine.toml"
    config.write_text('[model]\npath = "none"\n[engine]\nmake = "vllm"\n', encoding="utf-8")
    assert step_record.main(["--config", str(config), "--json", str(tmp_path / "steps.json")]) == 2
    assert 'make = "millrace"' in capsys.readouterr().err
    assert StepRecord.__struct_fields__
