"""Branches beside a step's rows: what holds of them is the answer, bit by bit, wherever they begin and
whoever shares their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import transformers

from engine.runner.inputs import StepInputs
from engine.runner.runner import ModelRunner
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.branches import DraftBranch
from engine.runner.speculation.drafter import Drafter
from engine.speculation_config import SpeculationConfig
from tests.unit.engine.runner.drafting import SAMPLINGS, totals
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

NUM_TOKENS, NUM_DRAFTS, NUM_BESIDE = 28, 4, 11


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


class KnowingDrafter(Drafter):
    """Knows how texts go on, and puts that into the plan's drafts, into one branch or another, or into
    guesses that begin in the middle of others. All else is wrong.
    """

    looks_up = False
    rows_beside = (NUM_BESIDE,)

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self.num_expected = self.num_guessed = 0
        # By slot: drafts that hold, and tokens that are expected behind guesses.
        self.held: dict[int, int] = {}
        self.expected: dict[int, list[int]] = {}

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        return [self._one(state, table) for state in states]

    def _one(self, state: SequenceState, table: SequenceTable) -> tuple[int, ...]:
        known = int(table.num_tokens[state.slot])
        said = table.tokens[state.slot, :known].tolist()
        (text,) = [each for each in self.texts if list(each[: state.num_prompt]) == said[: state.num_prompt]]
        rest = tuple(text[known : known + 8])
        if len(rest) < 8:
            return ()
        wrong = tuple((token + 1) % 199 for token in rest)
        # One is shorter than the plan's drafts. Which holds at a place of a block differs by text.
        turn = known + state.num_prompt
        held = turn % 5, turn // 2 % 5, turn // 3 % 4
        beyond = held[0] >= 1 and turn % 7 < 3
        self.held[state.slot] = NUM_DRAFTS if beyond else max(held)
        drafts, *others = [(rest[:each] + wrong[each:])[:NUM_DRAFTS] for each in held]
        if state.sampling.temperature == 0.0:
            guesses = [
                DraftBranch(tokens=rest[:3]),
                DraftBranch(tokens=rest[1:5], parent=0, num_shared=1),
                DraftBranch(tokens=rest[4:6], parent=1, num_shared=4),
                DraftBranch(tokens=wrong[2:4], parent=1, num_shared=2),
            ]
            self.expected[state.slot] = [rest[3], rest[5], rest[6]]
        else:
            guesses = []
        first = len(guesses)
        drafted = [
            DraftBranch(tokens=others[0], is_draft=True),
            DraftBranch(tokens=others[1][:3], is_draft=True),
            # They leave the plan's drafts, and a branch that left these.
            DraftBranch(tokens=(rest if beyond else wrong)[1:3], num_shared=1, is_draft=True),
            DraftBranch(tokens=rest[3:4], parent=first + 2, num_shared=3, is_draft=True),
        ]
        state.draft.branches = (*guesses, *drafted)
        return drafts

    def saw(self, inputs: StepInputs, table: SequenceTable) -> None:
        rows = inputs.branches
        if rows is None:
            return
        told = iter(rows.guessed)
        found: dict[int, list[int]] = {}
        for member, branch in zip(rows.members, rows.branches, strict=True):
            if not branch.is_draft:
                found.setdefault(inputs.states[member].slot, []).append(next(told))
        for member in set(rows.members):
            self.num_expected += self.held[inputs.states[member].slot]
        for slot, tokens in found.items():
            assert tokens[:3] == self.expected[slot]
            self.num_guessed += 3


def jobs_of(num_tokens: int, *, speculate: bool, first: int = 0) -> list[Job]:
    """Texts that end anywhere in a block."""
    return [
        Job(
            prompt_of(9 + index, 199, seed=index),
            num_tokens=num_tokens,
            sampling=SAMPLINGS[index % 3],
            speculate=speculate,
        )
        for index in range(first, first + 6)
    ]


def opened(folder: Path, **options: object) -> ModelRunner:
    speculation = SpeculationConfig(
        method="lookahead", min_acceptance=0.0, lookahead_window=5, lookahead_candidates=4
    )
    return open_runner(folder, speculation=speculation, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cache": {"block_size": 4}},
        {"cache": {"block_size": 4, "kv_dtype": "fp8", "kv_dtype_layers": {"0": "int8"}}},
        {"cache": {"block_size": 16, "kv_dtype": "fp8"}},
        {"cache": {"block_size": 8}, "dtype": "bfloat16"},
        {"cache": {"block_size": 64, "kv_dtype": "kivi4", "kv_dtype_layers": {"1": "int8"}}},
    ],
)
def test_what_holds_of_a_branch_is_the_answer(folder: Path, options: dict[str, object]) -> None:
    """Greedy, sampled and with penalties; in scratch blocks that were filled with NaN before; and beyond the
    end of a block.
    """
    with closing(opened(folder, **options)) as runner:
        size = runner.storage.block_size
        firsts = (0,) if size < NUM_TOKENS else range(size - 28, size - 10, 6)
        asked = [jobs_of(NUM_TOKENS + 12, speculate=False, first=first) for first in firsts]
        plain = [Driver(runner, seed=1).run(jobs) for jobs in asked]
        drafter = KnowingDrafter([job.prompt + job.output for jobs in plain for job in jobs])
        runner.proposer.drafter = drafter
        asked = [jobs_of(NUM_TOKENS, speculate=True, first=first) for first in firsts]
        drafted = [Driver(runner, seed=2).run(jobs) for jobs in asked]
    answers = list(chain(*drafted))
    for one, other in zip(chain(*plain), answers, strict=True):
        assert other.output[:NUM_TOKENS] == one.output[:NUM_TOKENS]
        assert other.logprobs == one.logprobs[: len(other.logprobs)]
    # All that was known was taken.
    assert totals(answers)[1] == drafter.num_expected > 100
    assert drafter.num_guessed > 30


def test_branches_that_a_step_has_no_room_for_are_left_out(folder: Path) -> None:
    """Answers are the same; and where a text nears the model's length."""
    outputs = []
    for most_rows, length in ((1 << 20, 256), (20, 256), (1 << 20, 40)):
        with closing(opened(folder, cache={"block_size": 4}, max_model_len=length)) as runner:
            assert runner.table.branch_room is not None
            room = runner.table.branch_room
            runner.table.branch_room = type(room)(**{**vars(room), "most_rows": most_rows})
            jobs = Driver(runner).run(jobs_of(22, speculate=True))
        outputs.append([job.output[:22] for job in jobs])
    assert outputs[0] == outputs[1] == outputs[2]


def test_scratch_blocks_are_nobody_elses(folder: Path) -> None:
    """Neither a plan's, nor the spare block, nor those of another slot."""
    with closing(opened(folder, cache={"block_size": 4})) as runner:
        room, storage = runner.table.branch_room, runner.storage
        assert room is not None
        scratch = [block for slot in range(room.num_slots) for block in room.of(slot)]
        assert len(set(scratch)) == len(scratch) == storage.num_scratch_blocks
        assert min(scratch) > storage.spare_slot // storage.block_size
        assert max(scratch) == len(storage.layers[0].keys) - 1
        before = np.array(storage.layers[0].keys[: storage.num_blocks])
        Driver(runner).run([Job(prompt_of(9, 199), num_tokens=3, speculate=True)])
        written = (storage.layers[0].keys[: storage.num_blocks] != before) & ~np.isnan(
            storage.layers[0].keys[: storage.num_blocks]
        )
        # Of the prompt, and of what was said and drafted behind it: not of the window.
        slots = written.any(axis=(1, 3)).sum()
        assert 9 + 2 <= slots <= 9 + 2 + 2 * NUM_DRAFTS
