"""Drafts of heads that are a tree: its shape, what it does not go with, and that behind a branch heads read
what they would have read anyway. (That no output changes is in test_head_combinations.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from engine.config import CacheConfig, EngineConfig
from engine.model.draft_tree import LIKELIEST, DraftTree
from engine.model.eagle3 import HeadRooms
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import make_plan, num_logit_rows, plan_input
from engine.runner import branch_draws
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.features import FeatureDrafter
from engine.runner.speculation.head import HeadDrafter
from engine.speculation_config import SpeculationConfig
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.lessons import Lesson
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.drafting import SAMPLINGS, TREE, poison_head, speculating
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner

OPTIONS: dict[str, Any] = {"cache": {"block_size": 4}}


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


@pytest.fixture(scope="module", params=["eagle3", "medusa"])
def head(request: Any, trained_head: Callable[..., Path]) -> Path:
    return trained_head(request.param)


def test_a_tree_has_what_comes_before_its_paths() -> None:
    speculation = SpeculationConfig(method="medusa", tree=((1, 0, 0), (2,), (0, 1), (1, 1)))
    tree = DraftTree.of(EngineConfig(speculation=speculation, cache=CacheConfig(block_size=4)))
    found = [(each.parent, each.num_shared, each.rank, each.num_drafts) for each in tree.branches]
    assert found == [(LIKELIEST, 0, 1, 3), (LIKELIEST, 0, 2, 1), (LIKELIEST, 1, 1, 1), (0, 1, 1, 1)]
    assert tree.rows_beside == [2, 3, 1]
    # Three drafts from the end of a block on, and one each.
    assert tree.num_blocks == 2 + 3


def jobs_of(lessons: list[Lesson], count: int = 6, **options: Any) -> list[Job]:
    values = {"num_tokens": 30, "speculate": True} | options
    return [
        Job(list(lesson.ids[: lesson.num_given]), sampling=SAMPLINGS[index % 3], **values)
        for index, lesson in enumerate((lessons * 2)[:count])
    ]


def test_hidden_states_of_a_branch_that_holds_are_those_of_its_text(
    folder: Path, head: Path, lessons: list[Lesson], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit those that a forward of the whole text has, behind every step; and some had moved."""
    num_moved, move = Counter[str](), branch_draws._move_features
    monkeypatch.setattr(
        branch_draws, "_move_features", lambda *given: (num_moved.update(["branch"]), move(*given))
    )
    kept: list[tuple[tuple[int, ...], int, list[Any]]] = []
    with closing(open_runner(folder, speculation=speculating(head, tree=TREE), **OPTIONS)) as runner:
        poison_head(runner)
        drafter = runner.proposer.drafter
        assert isinstance(drafter, FeatureDrafter)
        saw = drafter.saw

        def watched(inputs: StepInputs, table: SequenceTable) -> None:
            saw(inputs, table)
            for slot, state in zip(inputs.slots.tolist(), inputs.states, strict=True):
                end, prompt = int(drafter.seen[slot]), tuple(table.tokens[slot, : state.num_prompt].tolist())
                for position in range(max(0, end - min(5, drafter.num_features)), end):
                    place = position % drafter.num_features
                    kept.append((prompt, position, [each[slot, place].copy() for each in drafter.features]))

        monkeypatch.setattr(drafter, "saw", watched)
        jobs = Driver(runner).run(jobs_of(lessons))
        monkeypatch.setattr(drafter, "saw", saw)
        assert isinstance(runner.model, NativeDecoder)
        expected = {}
        for job in jobs:
            text = [*job.prompt, *job.output]
            Driver(runner).run([Job(text, num_tokens=1)])
            expected[tuple(job.prompt)] = [each[: len(text)].copy() for each in runner.model.captured]
    assert num_moved["branch"] > 10
    for prompt, position, features in kept:
        for found, rows in zip(features, expected[prompt], strict=True):
            assert np.array_equal(found, rows[position])


def test_a_tree_takes_fewer_steps_than_its_chain(folder: Path, head: Path, lessons: list[Lesson]) -> None:
    """Each answer is that without drafts; sampled ones gain as well."""
    plain = generated(folder, jobs_of(lessons, speculate=False), **OPTIONS)
    steps = {}
    for tree in ((), TREE):
        speculation = speculating(head, tree=tree)
        found = generated(folder, jobs_of(lessons), speculation=speculation, **OPTIONS)
        assert [job.output[:30] for job in found] == [job.output for job in plain]
        steps[tree] = [
            sum(job.num_steps for job in found if (job.sampling.temperature > 0) == sampled)
            for sampled in (False, True)
        ]
    assert steps[TREE][0] <= steps[()][0]
    assert steps[TREE][1] < steps[()][1]


def test_sequences_beyond_the_scratch_blocks_have_chains(
    folder: Path, head: Path, lessons: list[Lesson]
) -> None:
    branching: set[int] = set()
    with closing(open_runner(folder, speculation=speculating(head, tree=TREE), **OPTIONS)) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, FeatureDrafter)
        assert drafter.tree is not None
        saw = drafter.saw

        def watched(inputs: StepInputs, table: SequenceTable) -> None:
            saw(inputs, table)
            if inputs.branches is not None:
                branching.update(int(inputs.slots[member]) for member in inputs.branches.members)

        drafter.saw = watched  # type: ignore[method-assign]
        found = Driver(runner).run(jobs_of(lessons, 11))
    assert branching == set(range(drafter.tree.num_sequences))
    assert all(job.num_drafted for job in found)


def test_the_plan_counts_what_branches_are_computed_in(folder: Path, head: Path) -> None:
    model, available = ModelConfig(path=str(folder)), 1 << 32
    plans = {}
    for tree in ((), TREE):
        config = EngineConfig(speculation=speculating(head, tree=tree), cache=CacheConfig(block_size=4))
        given = plan_input(config, model, device="cpu", available_bytes=available)
        plans[tree] = make_plan(given)
    shape = DraftTree.of(config)
    assert num_logit_rows(config) >= 8 * sum(shape.rows_beside)
    scratch = shape.num_scratch_blocks * 4 * plans[()].kv_bytes_per_token
    assert plans[TREE].workspace_bytes >= plans[()].workspace_bytes + scratch
    with closing(open_runner(folder, speculation=config.speculation, **OPTIONS)) as runner:
        drafter, room = runner.proposer.drafter, runner.table.branch_room
        assert room is not None
        assert runner.storage.num_scratch_blocks == room.num_slots * shape.num_blocks
        if isinstance(drafter, HeadDrafter):
            assert given.draft is not None
            rooms, spec = drafter.rooms, given.draft.spec
            assert rooms == HeadRooms.of(spec, config)
            held = [each for layer in drafter.storage.layers for each in layer.tensors()]
            per_token = kv_bytes_per_token(spec, given.kv_dtype)
            # The spare block is one more.
            assert sum(each.nbytes for each in held) == (rooms.num_all_blocks + 1) * 4 * per_token


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": "ngram", "tree": ((1,),)},
            r"tree: drafts of method = 'ngram' are no tree; .* eagle3, medusa, mtp",
        ),
        ({"tree": ((0, 0, 0, 0, 1),)}, r"tree = \[\[0, 0, 0, 0, 1\]\]: .* one to num_draft_tokens = 4"),
        ({"tree": ((1,), ())}, r"tree = \[\[\]\]: a path has ranks from 0"),
        ({"tree": ((0, -1),)}, r"tree = \[\[0, -1\]\]: a path has ranks from 0"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    values = {"method": "eagle3", "draft_model": "x"} | changes
    with pytest.raises(ConfigError, match=words):
        EngineConfig(speculation=SpeculationConfig(**values)).validate()


@pytest.mark.parametrize(
    ("family", "tree", "device", "words"),
    [
        ("gemma3_text", TREE, "cpu", "tree: Gemma3ForCausalLM has layers with a window among others"),
        ("llama", TREE, "cuda", "tree: branches of a text are computed on CPUs alone"),
        ("llama", ((3, 3, 3, 3), (61,)), "cpu", "tree has more than 64 drafts"),
        ("llama", ((10**9,),), "cpu", "tree has more than 64 drafts"),
    ],
)
def test_what_trees_do_not_go_with_is_refused_by_name(
    family: str, tree: tuple[tuple[int, ...], ...], device: str, words: str, head: Path, tmp_path: Path
) -> None:
    changes = {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6} if "gemma" in family else {}
    make_checkpoint(tmp_path, family, **changes)
    config = EngineConfig(speculation=speculating(head, tree=tree))
    with pytest.raises(ConfigError, match=words):
        plan_input(config, ModelConfig(path=str(tmp_path)), device=device, available_bytes=1 << 34)
