"""Models whose layers carry a state, shared among ranks: the tokens of one process, from the first prompt on
and wherever a state is gone on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import ParallelConfig
from engine.speculation_config import SpeculationConfig
from kernels.native.library import NativeUnavailableError, load_native
from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.ranked import shared
from tests.unit.engine.runner.test_ranks import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    answers,
    assert_near,
    bits,
)
from tests.unit.engine.runner.test_states import engine, preempted_answers_go_on

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

# Families, changes, and degrees (parts, groups of experts, stages). Groups of heads are divided, one for each
# rank, or the same on several, whose heads are normed together; states lie in some stages alone, and so does
# attention.
SHAPES: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("lfm2", {}, (2, 1, 1)),
    ("lfm2-bias", {}, (4, 1, 1)),
    ("lfm2", {}, (1, 1, 3)),
    ("lfm2-moe", {}, (1, 2, 1)),
    ("qwen3-next", {}, (2, 2, 1)),
    ("qwen3-next", {}, (4, 1, 1)),
    ("qwen3-next", {}, (1, 1, 2)),
    ("qwen3.5", {}, (2, 1, 1)),
    ("qwen3.5", {}, (4, 1, 1)),
    ("qwen3.5", {}, (2, 1, 2)),
    ("qwen3.5-moe", {}, (1, 3, 1)),
    ("bamba", {}, (2, 1, 1)),
    ("bamba", {}, (4, 1, 1)),
    ("bamba-limits", {}, (4, 1, 1)),
    ("bamba", {}, (1, 1, 2)),
    ("granite-4", {}, (2, 1, 1)),
    ("granite-4-moe", {}, (2, 2, 1)),
    ("granite-4", {}, (1, 1, 3)),
    ("nemotron-h", {"n_groups": 2}, (2, 1, 1)),
    ("nemotron-h", {}, (1, 1, 3)),
    ("nemotron-h-moe", {}, (4, 2, 1)),
    ("nemotron-h-latent", {}, (2, 1, 2)),
    ("falcon-h1", {}, (2, 1, 1)),
    ("falcon-h1-norm", {}, (4, 1, 1)),
    ("falcon-h1", {}, (1, 1, 2)),
    ("olmo-hybrid", {}, (1, 1, 2)),
    ("recurrent-gemma", {}, (2, 1, 1)),
    ("recurrent-gemma-wide", {}, (1, 1, 3)),
    ("kimi-linear-heads", {}, (1, 1, 2)),
    ("minimax", {}, (1, 2, 1)),
    ("jamba", {}, (1, 1, 2)),
    ("jamba", {}, (1, 2, 1)),
    ("mamba", {}, (1, 1, 2)),
    ("mamba2", {}, (2, 1, 1)),
    ("mamba2-limits", {}, (4, 1, 1)),
    ("mamba2", {}, (2, 1, 2)),
]


@pytest.mark.parametrize(("family", "changes", "degrees"), SHAPES)
def test_ranks_give_the_tokens_of_one_process(
    family: str, changes: dict[str, Any], degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    """Of steps of many rows, in micro-batches, and of few."""
    model_type, others = HYBRIDS[family]
    make_checkpoint(tmp_path, model_type, **others | changes)
    runner, alone = shared(tmp_path, *degrees), open_runner(tmp_path, native="required")
    ours, theirs = answers(runner, chunk=61), answers(alone, chunk=61)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)
    else:
        assert_near(ours, theirs, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}], ids=["bfloat16", "int8"])
def test_rounded_numbers_are_near_those_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    model_type, changes = HYBRIDS["qwen3.5"]
    make_checkpoint(tmp_path, model_type, **changes)
    ours, theirs = shared(tmp_path, 2, **options), open_runner(tmp_path, native="required", **options)
    assert_near(answers(ours, num_tokens=1), answers(theirs, num_tokens=1), BFLOAT16_TOLERANCE)


# Heads of states, and channels; in all stages, and in one of two. The first stage of the last has no state.
GOING_ON = [
    ("qwen3.5", {}, ParallelConfig(tensor=2)),
    ("falcon-h1-norm", {}, ParallelConfig(tensor=4)),
    ("lfm2", {}, ParallelConfig(pipeline=2)),
    ("recurrent-gemma", {}, ParallelConfig(tensor=2, pipeline=2)),
    ("mamba", {}, ParallelConfig(pipeline=2)),
    ("mamba2", {}, ParallelConfig(tensor=2)),
    ("granite-4-moe", {}, ParallelConfig(expert=2)),
    ("lfm2", {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2}, ParallelConfig(pipeline=2)),
]


@pytest.mark.parametrize(("family", "changes", "parallel"), GOING_ON)
def test_states_are_gone_on_with_as_by_one_process(
    family: str, changes: dict[str, Any], parallel: ParallelConfig, tmp_path: Path
) -> None:
    """Behind a prefix that was computed for others, in choices and beams, behind an answer of another engine,
    and after drafts that were rejected.
    """
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1] | changes)
    prompt, motif = prompt_of(43, 199), prompt_of(6, 199)
    known = reference_greedy(oracle, prompt, 12)
    loop = [*motif, 5, *motif, 9, *motif[:3]]
    drafts = SpeculationConfig(method="ngram", min_ngram=1, min_acceptance=0.0)

    def run(by: ParallelConfig | None) -> list[list[int]]:
        with engine(tmp_path, parallel=by, speculation=drafts) as driver:
            first = driver.submit(prompt, max_tokens=12, temperature=0.0)
            driver.run()
            hit = driver.submit([*prompt[:37], *prompt_of(9, 199, seed=1)], max_tokens=12, temperature=0.0)
            drawn = driver.submit(prompt, max_tokens=12, n=3, seed=4)
            beams = driver.submit(prompt, max_tokens=12, n=3, best_of=3, beam_width=3, temperature=0.0)
            repeated = driver.submit(loop, max_tokens=40, temperature=0.0)
            going_on = driver.submit(
                prompt, max_tokens=12, temperature=0.0, output_token_ids=tuple(known[:7])
            )
            driver.run()
            assert driver.scheduler.load(driver.now).counters.prefix_hit_tokens >= 32
            assert driver.tokens(first) == known
            assert driver.tokens(going_on) == known[7:]
            found = [driver.tokens(each) for each in (hit, repeated)]
            return found + [driver.tokens(each, choice) for each in (drawn, beams) for choice in range(3)]

    assert run(parallel) == run(None)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [("qwen3.5", ParallelConfig(tensor=2)), ("bamba", ParallelConfig(pipeline=2))],
)
def test_preemption_goes_on_where_it_was(family: str, parallel: ParallelConfig, tmp_path: Path) -> None:
    preempted_answers_go_on(family, tmp_path, parallel=parallel)
