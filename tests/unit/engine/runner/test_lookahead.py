"""Lookahead: n-grams come of its window, belong to one text, and cost what their rows cost. (That no output
changes by them is in test_head_combinations and test_branches.)
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers

from engine.config import CacheConfig, EngineConfig
from engine.model.lookahead import LookaheadShape
from engine.model.plan import make_plan, plan_input
from engine.runner.speculation import ngram_pool
from engine.runner.speculation.lookahead import window_branches
from engine.runner.speculation.ngram_pool import LookaheadText, NgramPool
from engine.speculation_config import SpeculationConfig
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.lessons import Lesson
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.test_plan import LATENT_SIZES
from tests.unit.engine.runner.drafting import SAMPLINGS, totals
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

AHEAD = SpeculationConfig(method="lookahead", min_acceptance=0.0, num_draft_tokens=3)


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


def test_the_latest_ngrams_of_a_token_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = NgramPool(2)
    for rest in ((2, 3), (4, 5), (2, 3), (6, 7)):
        pool.add(1, rest)
    assert pool.after(1) == [(6, 7), (2, 3)]
    assert pool.after(2) == []
    monkeypatch.setattr(ngram_pool, "MOST_NGRAMS", 3)
    pool.add(8, (9, 9))
    pool.add(1, (2, 3))
    pool.add(5, (5, 5))
    assert (pool.after(8), pool.after(1), pool.after(5)) == ([], [(2, 3), (6, 7)], [(5, 5)])
    assert pool.num_ngrams == 3


def test_a_window_moves_on_and_leaves_ngrams_behind() -> None:
    text = np.arange(10, 16)
    ahead = LookaheadText(num_levels=2, num_columns=4, most_each=3)
    ahead.read(text)
    assert ahead.pool.after(10) == [(11, 12)]
    # Tokens of the text from everywhere.
    assert ahead.window(text).tolist() == [[10, 11, 12, 13], [11, 12, 13, 15]]
    ahead.computed([50, 51, 52, 53], num_tokens=7)
    assert ahead.pool.after(13) == [(15, 53), (14, 15)]
    assert ahead.pool.after(10) == [(11, 50), (11, 12)]
    text = np.append(text, [90])
    assert ahead.window(text).tolist() == [[11, 12, 13, 15], [50, 51, 52, 53]]
    # Three tokens came at once: two columns are behind them.
    ahead.computed([60, 61, 62, 63], num_tokens=10)
    assert ahead.window(text).tolist() == [[52, 53, 50, 51], [62, 63, 60, 61]]


def test_a_column_sees_the_first_level_up_to_its_own_token() -> None:
    first, *others = window_branches(np.array([[1, 2, 3], [11, 12, 13], [21, 22, 23]]))
    assert first.tokens == (1, 2, 3, 13, 23)
    assert [(each.tokens, each.parent, each.num_shared) for each in others] == [
        ((11, 21), 0, 1),
        ((12, 22), 0, 2),
    ]


def jobs_of(lessons: list[Lesson], **options: Any) -> list[Job]:
    return [
        Job(
            list(lesson.ids[: lesson.num_given]),
            num_tokens=30,
            sampling=SAMPLINGS[index % 3],
            speculate=True,
            **options,
        )
        for index, lesson in enumerate(lessons)
    ]


def test_ngrams_of_the_window_are_drafts_that_hold(
    folder: Path, lessons: list[Lesson], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the text itself is in the pool."""
    monkeypatch.setattr(LookaheadText, "read", lambda self, text: None)
    with closing(open_runner(folder, speculation=AHEAD)) as runner:
        jobs = Driver(runner).run(jobs_of(lessons))
    drafted, accepted = totals(jobs)
    assert 0 < accepted < drafted
    assert jobs[0].output[0] == lessons[0].ids[lessons[0].num_given]


def test_a_text_that_follows_many_has_scratch_blocks(folder: Path, lessons: list[Lesson]) -> None:
    """There are some for the first eight places of a batch."""
    crowd = [Job(prompt_of(9, 199, seed=number), num_tokens=2) for number in range(12)]
    with closing(open_runner(folder, speculation=AHEAD)) as runner:
        Driver(runner).run(crowd)
        drafted, _ = totals(Driver(runner, seed=1).run(jobs_of(lessons[:1])))
    assert drafted


def test_a_text_that_follows_another_finds_nothing_of_it(folder: Path, lessons: list[Lesson]) -> None:
    """Same slot, same prompt, another tenant: the same answer takes the same drafts."""
    with closing(open_runner(folder, speculation=AHEAD)) as runner:
        first, second = (
            Driver(runner, seed=1).run(jobs_of(lessons[:1], tenant=tenant)) for tenant in ("a", "b")
        )
        together = Driver(runner, seed=1).run(
            jobs_of(lessons[:1], tenant="a") + jobs_of(lessons[:1], tenant="b")
        )
    assert totals(first) == totals(second)
    assert first[0].num_steps == second[0].num_steps
    assert [totals([job])[0] for job in together] == [totals(first)[0]] * 2


@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", LATENT_SIZES), ("mistral", {"sliding_window": 9})],
)
def test_latent_keys_and_windows_of_all_layers_branch(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **changes)
    outputs = []
    for speculation in (SpeculationConfig(), AHEAD):
        jobs = [Job(prompt_of(7, 199, seed=seed) * 4, num_tokens=20, speculate=True) for seed in range(3)]
        options: dict[str, Any] = {"speculation": speculation, "cache": {"block_size": 4}}
        with closing(open_runner(tmp_path, **options)) as runner:
            outputs.append([job.output[:20] for job in Driver(runner).run(jobs)])
    assert outputs[0] == outputs[1]
    assert sum(job.num_accepted for job in jobs) > 0


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen3-next", {}, "Qwen3NextForCausalLM has layers that carry a state"),
        ("gemma3", {}, "Gemma3ForCausalLM has layers with a window among others"),
        ("llama", {"native": "off"}, "branches are computed by the native kernels of CPUs, and torch serves"),
        ("llama", {"num_draft_tokens": 1}, "num_draft_tokens = 1: n-grams of lookahead .* raise it to 2"),
    ],
)
def test_what_lookahead_does_not_go_with_is_refused_by_name(
    family: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_type, changes = HYBRIDS.get(family, (family, {}))
    if family == "gemma3":
        model_type, changes = "gemma3_text", {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6}
    make_checkpoint(tmp_path, model_type, **changes)
    num_drafts = options.pop("num_draft_tokens", 3)
    speculation = msgspec.structs.replace(AHEAD, num_draft_tokens=num_drafts)
    with pytest.raises(ConfigError, match=words):
        open_runner(tmp_path, speculation=speculation, **options)


def test_other_places_and_numbers_are_refused_before_anything_is_loaded(folder: Path) -> None:
    config = EngineConfig(speculation=AHEAD)
    with pytest.raises(ConfigError, match=r"'lookahead': branches of a text are computed on CPUs alone"):
        plan_input(config, ModelConfig(path=str(folder)), device="cuda", available_bytes=1 << 34)
    nothing = msgspec.structs.replace(AHEAD, lookahead_window=0)
    with pytest.raises(ConfigError, match=r"speculation.lookahead_window = 0: must be at least 1"):
        EngineConfig(speculation=nothing).validate()


def test_the_plan_counts_scratch_blocks(folder: Path) -> None:
    model, cache = ModelConfig(path=str(folder)), CacheConfig(block_size=4)
    plans = [
        make_plan(
            plan_input(
                EngineConfig(speculation=speculation, cache=cache),
                model,
                device="cpu",
                available_bytes=1 << 32,
            )
        )
        for speculation in (msgspec.structs.replace(AHEAD, method="ngram"), AHEAD)
    ]
    shape = LookaheadShape.of(EngineConfig(speculation=AHEAD, cache=cache))
    # Eight sequences; a branch of 5 tokens, two of 2 and two n-grams of 3, which begin anywhere in a block.
    assert shape.num_scratch_blocks == 8 * (2 + 2 * 2 + 2 * 2)
    assert shape.num_rows == 3 * 3 + 2 * 3
    scratch = shape.num_scratch_blocks * 4 * plans[0].kv_bytes_per_token
    assert plans[1].workspace_bytes >= plans[0].workspace_bytes + scratch
