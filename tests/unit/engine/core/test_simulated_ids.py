"""The simulated engine draws ids that the tokenizer has."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig, SimulatedConfig
from engine.runner.simulated import build
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.tokenizer_svc.checkpoints import byte_level, write


def drawn(folder: Path, simulation: SimulatedConfig) -> set[int]:
    """All ids of a long answer, and those that are reported as alternatives."""
    runner, *_ = build(EngineConfig(simulation=simulation), ModelConfig(path=str(folder)))
    new = NewSequence(
        sequence_id=1,
        token_ids=(5,),
        num_prompt_tokens=1,
        sampling=SamplingParams(logprobs=20),
        choice_index=0,
        grammar=None,
        adapter="",
        block_ids=(0,),
        adapter_slot=-1,
    )
    found = set()
    for step in range(800):
        row = ScheduledSequence(1, step, 1, (), True, ())
        plan = SchedulerOutput(step, (new,) if step == 0 else (), (row,), ())
        (result,) = runner.launch(plan).wait().results
        found |= {*result.token_ids, *result.logprobs[0].top_ids}
    return found


def test_ids_without_a_token_are_not_drawn(tmp_path: Path) -> None:
    tokenizer = byte_level(("<|end|>",))
    write(tmp_path, tokenizer)
    count = tokenizer.get_vocab_size()
    assert max(drawn(tmp_path, SimulatedConfig(step_ms=0.0))) == count - 1
    with pytest.raises(ConfigError, match=rf"first_token_id = 900: must be below the {count} ids"):
        drawn(tmp_path, SimulatedConfig(step_ms=0.0, first_token_id=900))
